"""A repair mends damage, to the same bytes; a build refuses it."""

import json
import shlex

import pytest

from precompute.cli import main
from tests.precompute.acts import SHARD, TABLE, Act, copied, flipped, lost, together


@pytest.fixture
def built(built, foreign):
    """A built project with other caches in its folder."""
    (built.folder / "foreign").symlink_to(foreign)
    return built


OTHER_SHARD = [SHARD.replace("/1/", "/2/"), "samples/000002.parquet", "commits/000002.json"]


RERUN, REPAIR = "rerun the", "precompute repair"
UNFINISHED = lost("seal.json", *OTHER_SHARD)
"""A cache of a killed build: without the last shard and the seal."""

FILES = {
    SHARD: 1,
    "samples/000002.parquet": 2,
    "commits/000000.json": 0,
    "plan/000000.parquet": None,
    "seal.json": None,
}
FILES |= {"latents/40x32/zarr.json": None}
NAMED: dict[str, tuple[Act, int | None, list[str]]] = {
    **{f"{name}, lost": (lost(name), shard, [REPAIR]) for name, shard in FILES.items()},
    **{f"{name}, flipped": (flipped(name), shard, [REPAIR]) for name, shard in FILES.items()},
    "seal.json, lost": (lost("seal.json"), None, [RERUN]),
    "the spec, lost": (lost("zarr.json"), None, [REPAIR, "verify again:"]),
    "the spec, flipped": (flipped("zarr.json"), None, [REPAIR, "verify again:"]),
    "half built, a flipped shard": (together(UNFINISHED, flipped(SHARD)), 1, [REPAIR, RERUN]),
    "a shard of another recipe": (copied("recipe", *OTHER_SHARD), 2, [REPAIR]),
    "no build record": (lost("build.json"), None, [RERUN]),
    "no build record, no samples table": (lost("build.json", TABLE), 1, [RERUN, REPAIR]),
}
"""Damage, its shard, and the steps that `verify` names."""


@pytest.mark.parametrize("what", NAMED)
def test_what_verify_names_is_repaired_to_the_same_bytes(built, what):
    """Its steps are run as printed; no sound shard is built again."""
    damage, damaged, expected = NAMED[what]
    with built.same_in_the_end():
        damage(built)
        steps, before = json.loads(built.report().read_text())["next"], built.place.marks()
        for step in steps:
            if step.startswith("rerun the `precompute build`"):
                built.build(code="samples table" in what and "half" not in what)
            elif step.startswith("precompute "):
                built.run(main, *shlex.split(step)[1:], code=3 if "half" in what else 0)
    assert [" ".join(step.split()[:2]) for step in steps] == expected
    after = built.place.marks()
    for name in (f"latents/40x32/c/{shard}/0/0/0" for shard in range(3) if shard != damaged):
        assert after[name] == before.get(name, after[name])
