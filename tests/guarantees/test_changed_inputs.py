"""Inputs that changed since the build: they are named and refused, or accepted with a flag."""

import re

import numpy as np
import pytest

from cache_store import open_cache
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


NEW, HEIGHT, TALLER = "--cache NEW", "array.image.rule.sizes", "build --image.height 40"
SOME_ADDED = ["  samples     22            24\n  new sample                sample-022\n", "/cache.yaml --extend"]

REFUSED: dict[str, tuple[str, Act, list[str]]] = {
    "other weights": ("build", other_weights, ["array.encoder.weights_sha256", NEW]),
    "another size": (TALLER, source(), [HEIGHT, NEW]),
    "a list that has grown": ("build", source(range(24)), SOME_ADDED),
    "another image": ("build", other_image(6), [f"{NOT_ENCODED}sample-006", "image of sample-006", NEW]),
    "another image, extending": ("build --extend", other_image(9, range(24)), [f"{NOT_ENCODED}sample-009"]),
    "another image, no shard": (
        "build",
        together(other_image(6), lost("latents/40x32/c/0/0/0/0")),
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


@pytest.mark.parametrize(
    ("store_format", "lists", "losses", "bounds"),
    [
        ("zarr", [SHORT, LONG], [], [0, 8, 12, 20, 22]),
        ("webdataset", [SHORT, LONG], [], [0, 8, 12, 20, 22]),
        ("zarr", [SHORT, range(13), LONG], [], [0, 8, 12, 13, 21, 22]),
        ("zarr", [SHORT, LONG], ["seal.json", RECORD], [0, 8, 12, 20, 22]),
    ],
)
def test_an_extension_appends_shards_and_touches_none(project, store_format, lists, losses, bounds):
    """Its samples are those of a build of the long list, but for rounding: other samples share their batches."""
    form = {"store__format": store_format}
    for numbers in lists:
        project.has(numbers)
        if before := project.place.marks():
            project.lose(*losses)
        message = project.build("--extend", **form)
    assert f"extending from {len(lists[-2])} to 22 samples" in message
    assert "damage" not in message
    after, lost = project.place.marks(), (SHARD, TABLE, RECORD) if losses else ()
    kept = {name for name in before if after.get(name) == before[name]}
    of_shards = {name for name in before if re.search(r"\d", name) and not name.endswith("zarr.json")}
    assert of_shards <= kept.union(lost)
    extended, address = open_cache(project.place.address), project.caches.below("whole").address
    assert extended.spec.bounds.tolist() == bounds
    assert not verify(project.place.address, "full").findings
    project.build(name="whole", **form)
    whole, everyone = open_cache(address), np.arange(len(extended))
    np.testing.assert_allclose(extended.read(everyone), whole.read(everyone), atol=1e-4)
    columns = ["row", "id", "uri", "conversations", "content_sha256"]
    assert extended.samples(everyone, columns) == whole.samples(everyone, columns)
    assert extended.spec.plan_digest == whole.spec.plan_digest, "so they join by row"


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
