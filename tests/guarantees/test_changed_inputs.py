"""Inputs that changed since the build: they are named and refused, or accepted with a flag."""

import pytest

from cache_store.cache.metadata import read_seal
from cache_store.verify.verify import verify
from tests.precompute.acts import (
    MISSING,
    NOT_ENCODED,
    RECORD,
    SHARD,
    TABLE,
    Act,
    build_with_a_missing_image,
    image,
    lost,
    mend,
    other_image,
    source,
    together,
)
from tests.precompute.conftest import BROKEN, SAMPLES, Project, image_bytes, make_vae, sample_name


def other_weights(project: Project) -> None:
    project.vae = make_vae(project.folder / "other-vae", seed=1)


def without_an_image(project: Project) -> None:
    project.unpack()
    image(project, 2).unlink()


NEW, HEIGHT, TALLER = "--cache NEW", "array.image.height  32            40", "build --image.height 40"
SOME_ADDED = ["  samples     22            24\n  new sample                sample-022\n", "/cache.yaml --extend"]

REFUSED: dict[str, tuple[str, Act, list[str]]] = {
    "other weights": ("build", other_weights, ["array.encoder.weights_sha256", NEW]),
    "another size": (TALLER, source(), [HEIGHT, NEW]),
    "a list that has grown": ("build", source(range(24)), SOME_ADDED),
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
        ["built again: sample-004", "--retry-rejected"],
    ),
}


@pytest.mark.parametrize("change", REFUSED)
def test_other_inputs_are_refused_by_name(built, change):
    command, make, said = REFUSED[change]
    make(built)
    with built.untouched():
        message = built.do(command, code=1)
    assert all(each in message for each in said), message
    assert "weights" not in message or make is other_weights
    assert "rows" not in message


SHORT, LONG = range(12), range(SAMPLES)
"""Samples in shards of 8: the short list fills one and a half shards."""
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
    """New ids sort last; bytes, seal and identity are those of a build of the long list, and full shards stay."""
    form = {"store__format": store_format}
    for numbers in lists:
        project.has(numbers)
        if before := project.place.marks():
            project.lose(*losses)
        message = project.build("--extend", **form)
    assert said in message
    assert "damage" not in message
    after = project.place.marks()
    full = [mark for shard in range(len(lists[-2]) // 8) for mark in (f"c/{shard}/", f"{shard:06d}.")]
    kept = {name for name in before if after[name] == before[name]}
    assert kept == {name for name in before if any(mark in name for mark in full)}
    project.build(name="whole", **form)
    assert project.caches.below("whole").timeless() == project.files()
    assert not verify(project.place.address, "full").findings


def test_a_retry_ends_in_the_cache_of_the_mended_images(project):
    """Except for the plan's fingerprints and the order of events, which enter no identity."""
    build_with_a_missing_image(project)
    with project.untouched():
        assert "recovered 0 of 3 rejected samples tried again" in project.build("--retry-rejected")
        mend(project, MISSING, BROKEN[0])
        message = project.build()
    assert f"images that were missing and are there now: 1 ({sample_name(MISSING)})" in message
    assert f"images that were rejected and have changed: 1 ({sample_name(BROKEN[0])})" in message
    assert message.count("--retry-rejected") == 2
    before = project.place.marks()
    assert "recovered 2 of 3 rejected samples tried again" in project.build("--retry-rejected")
    after = project.place.marks()
    assert [after[name] for name in (SHARD, TABLE, RECORD)] == [before[name] for name in (SHARD, TABLE, RECORD)]
    assert not verify(project.place.address, "full").findings
    project.build(name="fresh")
    assert read_seal(project.place.address).identity == read_seal(project.caches.below("fresh").address).identity
    assert "there now" not in project.build()
