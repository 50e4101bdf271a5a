"""Inputs that are no longer those of the cache: refused by name, or taken in by the flag that asks for it."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cache.files import open_table
from cache_store.cache.metadata import read_build, read_seal
from cache_store.storage.local import LocalStore
from cache_store.verify.verify import verify
from tests.precompute.conftest import (
    BROKEN,
    SAMPLES,
    Project,
    flip,
    image_bytes,
    make_vae,
    places,
    sample_name,
    timeless_files,
)
from tests.precompute.resume.conftest import (
    RECORD,
    SHARD,
    TABLE,
    Act,
    lost,
    other_image,
    rewrite,
    source,
    together,
)


def other_weights(project: Project) -> None:
    project.vae = make_vae(project.folder / "other-vae", seed=1)


def without_an_image(project: Project) -> None:
    project.unpack()
    image(project, 2).unlink()


def another_caption(project: Project) -> None:
    rewrite(project.source / "chat.json", "Picture 9.", "Picture nine.")


def unreadable(project: Project) -> None:
    """Reading /proc/self/mem at its start is a real input/output error."""
    project.lose(RECORD)
    (project.cache / RECORD).symlink_to("/proc/self/mem")


NEW, HEIGHT, TALLER = "--cache NEW", "array.image.height  32            40", "build --image.height 40"
NOT_ENCODED = "1 of 22 images are not the ones encoded: "
SOME_ADDED = ["  samples     22            24\n  new sample                sample-022\n", "/cache.yaml --extend"]
SOME_GONE = "3 gone (sample-000, sample-001, sample-002)"
CAPTION = ["image name or text  sample-009", NEW]

REFUSED: dict[str, tuple[str, Act, list[str]]] = {
    "other weights": ("build", other_weights, ["array.encoder.weights_sha256", NEW]),
    "another size": (TALLER, source(), [HEIGHT, NEW]),
    "another list": ("build", source([*range(3, SAMPLES), 40]), [f"1 new (sample-040); {SOME_GONE}", NEW]),
    "a list that has grown": ("build", source(range(24)), SOME_ADDED),
    "another caption": ("build", another_caption, CAPTION),
    "another image": ("build", other_image(6), [f"{NOT_ENCODED}sample-006", "image of sample-006", NEW]),
    "another image, extending": ("build --extend", other_image(9, range(24)), [f"{NOT_ENCODED}sample-009"]),
    "another image, no shard": (
        "build",
        together(other_image(6), lost("latents/c/0/0/0/0")),
        [f"{NOT_ENCODED}sample-006"],
    ),
    "another image, repairing": ("repair --shards [1]", other_image(9), [f"{NOT_ENCODED}sample-009"]),
    "an image that is gone": ("build", without_an_image, [f"{NOT_ENCODED}sample-002"]),
    "a mended reject, repairing": (
        "repair --shards [0]",
        source(sample_004=image_bytes(4)),
        ["have changed: sample-004", "--retry-rejected"],
    ),
    "a record that cannot be read": ("build", unreadable, [f"Input/output error: {{cache}}/{RECORD}"]),
}


@pytest.mark.parametrize("change", REFUSED)
def test_other_inputs_are_refused_by_name(built, change):
    command, make, said = REFUSED[change]
    make(built)
    where = {"folder": built.folder, "cache": built.cache}
    with built.untouched():
        message = built.do(command.format(**where), code=1)
    for each in said:
        assert each.format(**where) in message
    assert "weights" not in message or make is other_weights
    assert "rows" not in message


OTHER_FIELDS = {
    "samples_per_shard": "--store.samples_per_shard 4",
    "store_format": "--store.format webdataset",
    "array.codec": "--store.codec zstd",
    "array.dtype": "--store.dtype float32",
    "array.image.height": "--image.height 40",
    "array.image.width": "--image.width 48",
    "array.image.fit": "--image.fit crop",
    "array.image.resample": "--image.resample lanczos",
    "array.image.range": "--image.range theworld",
    "array.image.decode": "--image.decode reduced",
    "array.image.flip": "--image.flip true",
    "array.image.max_pixels": "--image.max_pixels 9999",
    "array.encoder.path": "--encoder.fold false",
    "array.encoder.posterior": "--encoder.posterior moments",
    "array.encoder.compute_dtype": "--encoder.compute_dtype bfloat16",
    "array.encoder.batch_size": "--encoder.batch_size 4",
}


@pytest.mark.parametrize("field", OTHER_FIELDS)
def test_every_field_of_the_recipe_is_refused_by_name(built, field):
    with built.untouched():
        assert re.search(rf"^  {re.escape(field)}  ", built.do(f"build {OTHER_FIELDS[field]}", code=1), re.MULTILINE)


def test_files_with_the_bytes_that_were_encoded_are_no_change(built):
    """From a zip to a folder: each looks another, and none is."""
    built.unpack()
    built.build()


def test_the_cache_of_a_list_that_grew_is_left_alone_by_a_repair(built):
    with built.same_in_the_end():
        built.has(range(32))
        assert "new in the source: 10 samples" in built.repair("--shards", "[1]")


SHORT, LONG = range(12), range(SAMPLES)
"""Samples, in shards of 8: the short list fills one and a half."""
OPEN = "from 12 to 22 samples; shards [0, 1) are full and kept; shard 1, partly filled so far, is written again\n"


@pytest.mark.parametrize(
    ("store_format", "lists", "losses", "said"),
    [
        ("zarr", [SHORT, LONG], [], OPEN),
        ("webdataset", [SHORT, LONG], [], OPEN),
        ("zarr", [SHORT, range(16), LONG], [], "from 16 to 22 samples; shards [0, 2) are full and kept\n"),
        ("zarr", [SHORT, LONG], ["seal.json", RECORD], OPEN),
    ],
)
def test_an_extended_cache_is_the_cache_of_the_long_list(project, store_format, lists, losses, said):
    """New ids that sort last: the bytes, seal and identity of a build of the long list; full shards are kept."""
    form = {"store__format": store_format}
    for numbers in lists:
        project.has(numbers)
        if before := places(project.cache):
            project.lose(*losses)
        message = project.build("--extend", **form)
    assert said in message
    assert "damage" not in message
    after = places(project.cache)
    full = [mark for shard in range(len(lists[-2]) // 8) for mark in (f"c/{shard}/", f"{shard:06d}.")]
    kept = {name for name in before if after[name] == before[name]}
    assert kept == {name for name in before if name == "build.json" or any(mark in name for mark in full)}
    project.build(name="whole", **form)
    assert timeless_files(project.folder / "whole") == project.files()
    assert not verify(project.cache, "full").findings


def test_rows_stay_where_they_are_when_new_ids_sort_first(project):
    """Though the plan is then not sorted by id, the cache is rerun, repaired and restored like any other."""
    project.has(range(10, SAMPLES))
    project.build()
    kept = open_cache(project.cache).read(np.arange(7))
    project.has()
    longer = (project.source / "chat.json").rename(project.source / "longer.json")
    project.build("--extend", source__path=str(longer))
    assert read_build(project.cache).config["source"]["path"] == str(longer)
    project.repair("--shards", "[2]")
    longer.rename(project.source / "chat.json")
    project.build()
    ids = open_table(LocalStore(project.cache), "plan.parquet").whole()["id"].to_pylist()
    assert ids == [sample_name(number) for number in (*range(10, SAMPLES), *range(10))]
    np.testing.assert_array_equal(open_cache(project.cache).read(np.arange(7)), kept)
    with project.same_in_the_end():
        for flags in ([], ["--extend"], ["--check-sources"]):
            assert "nothing to encode" in project.build(*flags)
        flip(project.cache / SHARD)
        project.repair("--report", project.report())
        for name in ("plan.parquet", "zarr.json", "seal.json"):
            project.lose(name)
            project.build()


MISSING = 18


@pytest.fixture
def folder(project: Project) -> Project:
    """Built from a folder of images in which one, of the last shard, is missing; the broken ones lie in the others."""
    project.unpack()
    image(project, MISSING).unlink()
    project.build()
    return project


def image(project: Project, number: int) -> Path:
    return project.images / f"{sample_name(number)}.png"


def mend(project: Project, *numbers: int) -> None:
    for number in numbers:
        image(project, number).write_bytes(image_bytes(number))


def test_a_retry_ends_in_the_cache_of_the_mended_images(folder):
    """But for the plan's fingerprints and the order of events, which enter no identity."""
    with folder.untouched():
        assert "recovered 0 of 3 rejected samples tried again" in folder.build("--retry-rejected")
        mend(folder, MISSING, BROKEN[0])
        message = folder.build()
    assert f"images that were missing and are there now: 1 ({sample_name(MISSING)})" in message
    assert f"images that were rejected and have changed: 1 ({sample_name(BROKEN[0])})" in message
    assert message.count("--retry-rejected") == 2
    before = places(folder.cache)
    assert "recovered 2 of 3 rejected samples tried again" in folder.build("--retry-rejected")
    after = places(folder.cache)
    assert [after[name] for name in (SHARD, TABLE, RECORD)] == [before[name] for name in (SHARD, TABLE, RECORD)]
    assert not verify(folder.cache, "full").findings
    folder.build(name="fresh")
    assert read_seal(folder.cache).identity == read_seal(folder.folder / "fresh").identity
    assert "there now" not in folder.build()


def test_an_extension_tries_rejects_of_the_shard_it_rewrites(folder):
    """Those of other shards stay rejected, and are named each time."""
    folder.has(range(24))
    mend(folder, MISSING, BROKEN[0], 22, 23)
    said = folder.build("--extend")
    assert f"in the shard that is written again: 1 ({sample_name(MISSING)})" in said
    seal = read_seal(folder.cache)
    assert (seal.planned, seal.rejected) == (24, len(BROKEN))
    assert f"images that were rejected and have changed: 1 ({sample_name(BROKEN[0])})" in folder.build()


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
        folder.has(range(SAMPLES + 1))
        mend(folder, SAMPLES)
    if unconcerned is None:
        mend(folder, MISSING)
    change_in_secret(image(folder, number))
    with folder.untouched():
        message = folder.do(command, code=1)
    assert f"{NOT_ENCODED}{sample_name(number)}" in message
    assert f"image of {sample_name(number)}" in message
    if unconcerned:
        folder.do(unconcerned)
    change_in_secret(image(folder, number))
    folder.do(command)


def test_a_check_reads_every_image_before_other_work(folder):
    everything = f"{SAMPLES} images were read again; all that are encoded have the bytes"
    with folder.untouched():
        said = folder.build("--check-sources")
    assert everything in said
    assert "there now" not in said
    folder.lose("seal.json", "commits/000002.json")
    change_in_secret(image(folder, 7))
    folder.build("--check-sources", code=1)
    assert not (folder.cache / "commits/000002.json").exists()
    change_in_secret(image(folder, 7))
    assert "16 images were read again" in folder.build("--check-sources")
    image(folder, 7).unlink()
    assert "missing" in folder.build("--check-sources", code=1)


@pytest.mark.parametrize("name", [TABLE, RECORD])
@pytest.mark.parametrize("losses", [[], ["seal.json"]])
def test_a_check_names_shards_whose_images_nothing_remembers(folder, name, losses):
    folder.lose(*losses)
    (folder.cache / name).write_bytes(bytes(reversed((folder.cache / name).read_bytes())))
    with folder.untouched():
        message = folder.build("--check-sources", code=1)
    assert "what the images of 1 shard were cannot be told" in message
    assert f"first run precompute repair {folder.cache} --shards '[1]'" in message
    folder.repair("--shards", "[1]")
    assert "22 images were read again" in folder.build("--check-sources")
