"""Inputs that are no longer those of the cache: refused by name, or taken in by the flag that asks for it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_store.cache.metadata import read_seal
from cache_store.verify.verify import verify
from tests.precompute.conftest import BROKEN, SAMPLES, Project, image_bytes, make_vae, places, sample_name, write_source


def act(project: Project, command: str, code: int = 0) -> str:
    name, *options = command.split()
    return {"build": project.build, "repair": project.repair}[name](*options, code=code)


def source(*samples: range | list[int], **replaced: bytes) -> Callable[[Project], object]:
    return lambda project: project.has(*samples, **replaced)


def other_weights(project: Project) -> None:
    project.vae = make_vae(project.folder / "other-vae", seed=1)


def without_an_image(project: Project) -> None:
    project.unpack()
    (project.images / "sample-002.png").unlink()


def another_image_and_a_lost_shard(project: Project) -> None:
    other_image(6)(project)
    project.lose("latents/c/0/0/0/0")


def another_caption(*lost: str) -> Callable[[Project], None]:
    def change(project: Project) -> None:
        project.lose(*lost)
        chat = project.source / "chat.json"
        chat.write_text(chat.read_text().replace("Picture 9.", "Picture nine."))

    return change


def other_image(number: int, numbers: range = range(SAMPLES)) -> Callable[[Project], object]:
    return source(numbers, **{f"sample_{number:03d}": image_bytes(99)})


NEW, HEIGHT = "--cache NEW", "array.image.height  32            40"
NOT_ENCODED = "1 of 22 images are not the ones encoded: "
SOME_ADDED = ["  samples     22            24\n  new sample                sample-022\n", "/cache.yaml --extend"]
SOME_GONE = "3 gone (sample-000, sample-001, sample-002)"
MENDED = ["have changed: sample-004", "--retry-rejected"]

REFUSED: dict[str, tuple[str, Callable[[Project], object], list[str]]] = {
    "other weights": ("build", other_weights, ["array.encoder.weights_sha256", NEW]),
    "another size": ("build --image.height 40", source(), [HEIGHT, NEW]),
    "another size, no spec": ("build --image.height 40", lambda project: project.lose("zarr.json"), [HEIGHT, NEW]),
    "another size, extending": ("build --extend --image.height 40", source(range(24)), [HEIGHT, NEW]),
    "another list": ("build", source([*range(3, SAMPLES), 40]), [f"1 new (sample-040); {SOME_GONE}", NEW]),
    "a list that has lost some": ("build --extend", source(range(3, 24)), [SOME_GONE, NEW]),
    "a list that has grown": ("build", source(range(24)), SOME_ADDED),
    "another caption": ("build", another_caption(), ["image name or text  sample-009", NEW]),
    "another caption, no plan": ("build", another_caption("plan.parquet"), ["samples of shard 1 "]),
    "another image": ("build", other_image(6), [f"{NOT_ENCODED}sample-006", NEW]),
    "another image, extending": ("build --extend", other_image(9, range(24)), [f"{NOT_ENCODED}sample-009"]),
    "another image, no shard": ("build", another_image_and_a_lost_shard, [f"{NOT_ENCODED}sample-006"]),
    "another image, repairing": ("repair --shards [1]", other_image(9), [f"{NOT_ENCODED}sample-009"]),
    "an image that is gone": ("build", without_an_image, [f"{NOT_ENCODED}sample-002"]),
    "a mended reject, repairing": ("repair --shards [0]", source(sample_004=image_bytes(4)), MENDED),
}


@pytest.mark.parametrize("change", REFUSED)
def test_other_inputs_are_refused_by_name(built, change):
    command, make, said = REFUSED[change]
    make(built)
    with built.untouched():
        message = act(built, command, code=1)
    for each in said:
        assert each in message
    assert "weights" not in message or make is other_weights
    assert "rows" not in message


def test_files_with_the_bytes_that_were_encoded_are_no_change(built):
    """From a zip to a folder: each looks another, and none is."""
    built.unpack()
    built.build()


@pytest.fixture
def folder(project: Project) -> Project:
    """Built from a folder of images in which one, of the last shard, is missing; the broken ones lie in the others."""
    project.unpack()
    image(project, MISSING).unlink()
    project.build()
    return project


MISSING = 18


def image(project: Project, number: int) -> Path:
    return project.images / f"{sample_name(number)}.png"


def mend(project: Project, *numbers: int) -> None:
    for number in numbers:
        image(project, number).write_bytes(image_bytes(number))


def test_a_retry_ends_in_the_cache_of_the_mended_images(folder):
    """But for the plan's fingerprints and the order of events, which enter no identity."""
    before = places(folder.cache)
    mend(folder, MISSING, BROKEN[0])
    assert "recovered 2 of 3 rejected samples tried again" in folder.build("--retry-rejected")
    after = places(folder.cache)
    for name in ("latents/c/1/0/0/0", "samples/000001.parquet", "commits/000001.json"):
        assert after[name] == before[name]
    assert not verify(folder.cache, "full").findings
    folder.build(name="fresh")
    assert read_seal(folder.cache).identity == read_seal(folder.folder / "fresh").identity
    assert "there now" not in folder.build()


def test_without_the_flag_rejects_stay_and_it_is_named(folder):
    mend(folder, MISSING, BROKEN[0])
    with folder.untouched():
        message = folder.build()
    assert f"images that were missing and are there now: 1 ({sample_name(MISSING)})" in message
    assert f"images that were rejected and have changed: 1 ({sample_name(BROKEN[0])})" in message
    assert message.count("--retry-rejected") == 2


def test_where_nothing_can_be_recovered_nothing_is_touched(folder):
    with folder.untouched():
        assert "recovered 0 of 3 rejected samples tried again" in folder.build("--retry-rejected")


def test_too_many_rejects_are_mended_by_a_retry(project):
    project.has(**dict.fromkeys(("sample_001", "sample_002", "sample_003"), b"no image"))
    assert "--retry-rejected" in project.build(code=1)
    project.has()
    project.build("--retry-rejected")
    assert not verify(project.cache, "full").findings


def test_an_extension_tries_rejects_of_the_shard_it_rewrites(folder):
    write_source(folder.source, range(24))
    mend(folder, MISSING, 22, 23)
    said = folder.build("--extend")
    assert f"in the shard that is written again: 1 ({sample_name(MISSING)})" in said
    seal = read_seal(folder.cache)
    assert (seal.planned, seal.rejected) == (24, len(BROKEN))


def test_a_retry_that_stops_halfway_has_lost_no_shard(folder, at_second_batch):
    """The shard that it was encoding again stays as it was until there is another."""
    with folder.same_in_the_end():
        mend(folder, BROKEN[0])
        at_second_batch.append(lambda: os.kill(os.getpid(), signal.SIGTERM))
        folder.build("--retry-rejected", code=3)
        assert len(list((folder.cache / "commits").iterdir())) == 3
        folder.build()


@pytest.mark.parametrize(
    ("flag", "numbers", "mended"),
    [("--extend", range(24), {}), ("--retry-rejected", range(SAMPLES), {"sample_004": image_bytes(4)})],
)
def test_new_work_holds_a_damaged_shard_to_what_it_was(built, flag, numbers, mended):
    names = ("latents/c/1/0/0/0", "samples/000001.parquet")
    before = {name: built.files()[name] for name in names}
    built.lose(names[1])
    built.has(numbers, **mended, sample_009=image_bytes(99))
    message = built.build(flag, code=1)
    assert "do not come out as they were, so that nothing of them was replaced: 1\n" in message
    built.has(numbers, **mended)
    built.build(flag)
    assert {name: built.files()[name] for name in names} == before


def change_in_secret(path: Path) -> None:
    """Other bytes, of the same size and time; a second time, those of before."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


UNSEEN: dict[str, tuple[int, str | None]] = {
    "build --check-sources": (7, "build"),
    "repair --shards 0": (7, "repair --shards 1"),
    "build --retry-rejected": (MISSING + 1, None),
    "build --extend": (MISSING + 1, None),
}
"""By command: the sample whose image changed, and a command that does not look at it."""


@pytest.mark.parametrize("command", UNSEEN)
def test_a_change_that_no_size_or_time_shows_is_found(folder, command):
    """By a check, and where the shard is to be built again; not elsewhere."""
    number, unconcerned = UNSEEN[command]
    if command == "build --extend":
        write_source(folder.source, range(SAMPLES + 1))
        mend(folder, SAMPLES)
    if unconcerned is None:
        mend(folder, MISSING)
    change_in_secret(image(folder, number))
    with folder.untouched():
        message = act(folder, command, code=1)
    assert f"{NOT_ENCODED}{sample_name(number)}" in message
    assert f"image of {sample_name(number)}" in message
    if unconcerned:
        act(folder, unconcerned)
    change_in_secret(image(folder, number))
    act(folder, command)


def test_a_check_says_how_many_images_it_read(folder):
    with folder.untouched():
        said = folder.build("--check-sources")
    assert f"{SAMPLES} images were read again; all that are encoded have the bytes" in said


def test_a_check_precedes_the_work_that_is_left(folder):
    folder.lose("seal.json", "commits/000002.json")
    change_in_secret(image(folder, 7))
    folder.build("--check-sources", code=1)
    assert not (folder.cache / "commits/000002.json").exists()
    change_in_secret(image(folder, 7))
    assert "16 images were read again" in folder.build("--check-sources")


@pytest.mark.parametrize("name", ["samples/000001.parquet", "commits/000001.json"])
@pytest.mark.parametrize("lost", [[], ["seal.json"]])
def test_a_check_names_shards_whose_images_nothing_remembers(folder, name, lost):
    folder.lose(*lost)
    (folder.cache / name).write_bytes(bytes(reversed((folder.cache / name).read_bytes())))
    with folder.untouched():
        message = folder.build("--check-sources", code=1)
    assert "what the images of 1 shards were cannot be told" in message
    assert f"first run precompute repair {folder.cache} --shards '[1]'" in message
    folder.repair("--shards", "[1]")
    assert "22 images were read again" in folder.build("--check-sources")


def test_an_image_that_is_gone_is_found_by_a_check(folder):
    image(folder, 7).unlink()
    assert "missing" in folder.build("--check-sources", code=1)
