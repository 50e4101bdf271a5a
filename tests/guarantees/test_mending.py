"""A repair mends damage, to the same bytes; a build refuses it."""

import io
import json
import shlex

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.cli import main
from tests.precompute.acts import RECORD, SHARD, TABLE, Act, copied, flipped, lost, together
from tests.precompute.conftest import Project


@pytest.fixture
def built(built, foreign):
    """A built project with other caches in its folder."""
    (built.folder / "foreign").symlink_to(foreign)
    return built


def swapped_plan(project: Project) -> None:
    """Swap the images of two samples in the plan, before any shard is built from it."""
    project.lose("seal.json", "commits/000000.json", RECORD)
    plan = pq.read_table(io.BytesIO(project.place.read("plan/000000.parquet")))
    uris = plan["uri"].to_pylist()
    uris[0], uris[1] = uris[1], uris[0]
    pq.write_table(plan.set_column(1, "uri", pa.array(uris)), swapped := io.BytesIO(), row_group_size=8)
    project.place.put("plan/000000.parquet", swapped.getvalue())


AGAIN, PLAN = "shard 1: ", "plan/000000.parquet is lost or is not the planned one"
SPEC_LOST, ROLL, OTHER_SEAL = "zarr.json is missing", "shards.bin is not as sealed", copied("recipe", "seal.json")
OTHER_SHARD = [SHARD.replace("/1/", "/2/"), "samples/000002.parquet", "commits/000002.json"]

MENDED: dict[str, tuple[Act, list[int], list[str]]] = {
    "a shard, no seal": (lost(SHARD, "seal.json"), [1], [AGAIN]),
    "a foreign shard": (copied("images", *OTHER_SHARD), [2], ["is not the record that the cache was sealed with"]),
    "a swapped plan": (swapped_plan, [0, 1], [PLAN]),
    "a foreign seal": (copied("images", "seal.json"), [], [ROLL]),
    "spec and samples, beside it": (together(OTHER_SEAL, lost("zarr.json", TABLE)), [1], [SPEC_LOST, ROLL, AGAIN]),
    "all metadata but the plan": (
        lost("zarr.json", "latents/40x32/zarr.json", "build.json"),
        [],
        [SPEC_LOST],
    ),
}
"""Damage, the shards that are rebuilt for it, and what is said; the table in `test_decide.py` has the rest."""


@pytest.mark.parametrize("what", MENDED)
def test_damage_is_mended_to_the_same_bytes(built, what):
    """A build names the first damage and the repair, which builds no other shard again."""
    damage, rebuilt, said = MENDED[what]
    with built.same_in_the_end():
        damage(built)
        before = built.place.marks()
        assert said[0] in built.build(code=1)
        message = built.repair(code=3 if what == "a swapped plan" else 0)
        if what == "a swapped plan":
            built.build()
        after = built.place.marks()
    shards = [f"latents/40x32/c/{shard}/0/0/0" for shard in range(3)]
    written = {number for number, name in enumerate(shards) if after[name] != before.get(name)}
    assert written <= {*rebuilt}, "in a bucket, a file that has the right bytes stays"
    notes = [line for line in message.splitlines() if "damage found" in line]
    assert len(notes) == len(said), notes
    for note, words in zip(notes, said, strict=True):
        assert words in note
    assert ("the old seal did not match these shards" in message) is ("foreign seal" in what or "beside it" in what)


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
    "half built, a flipped samples table": (together(UNFINISHED, flipped(TABLE)), 1, [REPAIR, RERUN]),
    "half built, a flipped record": (together(UNFINISHED, flipped(RECORD)), 1, [REPAIR, RERUN]),
    "a shard of another recipe": (copied("recipe", *OTHER_SHARD), 2, [REPAIR]),
    "no build record": (lost("build.json"), None, [RERUN]),
    "neither build record nor seal": (lost("build.json", "seal.json"), None, [RERUN]),
    "no build record, no samples table": (lost("build.json", TABLE), 1, [RERUN, REPAIR]),
    "a foreign seal and no spec": (together(OTHER_SEAL, lost("zarr.json")), None, [REPAIR, "verify again:"]),
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
