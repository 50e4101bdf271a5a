"""Damage, mended by the next build or by a repair: to the same bytes, or not at all."""

import hashlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache_store.verify.verify import verify
from precompute.cli import main
from tests.precompute.conftest import Project, flip, image_bytes, places
from tests.precompute.resume.conftest import RECORD, SHARD, TABLE, Act, copied, flipped, lost, other_image, together


def swapped_plan(project: Project) -> None:
    """Two samples of the plan have each other's image; nothing was built by it."""
    project.lose("seal.json", "commits/000000.json", RECORD)
    plan = pq.read_table(project.cache / "plan.parquet")
    uris = plan["uri"].to_pylist()
    uris[0], uris[1] = uris[1], uris[0]
    pq.write_table(plan.set_column(2, "uri", pa.array(uris)), project.cache / "plan.parquet", row_group_size=8)


AGAIN, PLAN = "shard 1 is built again: ", "plan.parquet is written again from the source"
SPEC_LOST, OTHER_SEAL = "zarr.json: is missing", copied("recipe", "seal.json")
OTHER_SHARD = [SHARD.replace("/1/", "/2/"), "samples/000002.parquet", "commits/000002.json"]

MENDED: dict[str, tuple[Act, list[int], list[str]]] = {
    "a shard": (lost(SHARD), [1], [AGAIN]),
    "a shard, no seal": (lost(SHARD, "seal.json"), [1], [AGAIN]),
    "a samples table": (lost(TABLE), [1], [AGAIN]),
    "a record": (lost(RECORD), [1], []),
    "a record, no seal": (lost(RECORD, "seal.json"), [1], []),
    "a record, damaged": (flipped(RECORD), [1], [AGAIN]),
    "a foreign shard": (copied("images", *OTHER_SHARD), [2], ["is not the record that the cache was sealed with"]),
    "the plan": (lost("plan.parquet"), [], [PLAN]),
    "the plan, damaged": (flipped("plan.parquet"), [], [PLAN]),
    "the plan of another cache": (copied("texts", "plan.parquet"), [], [PLAN]),
    "a swapped plan": (swapped_plan, [0, 1], [PLAN]),
    "the seal": (lost("seal.json"), [], []),
    "the seal, damaged": (flipped("seal.json"), [], ["the seal is made again from the records"]),
    "a foreign seal": (copied("images", "seal.json"), [], [PLAN]),
    "the build record": (lost("build.json"), [], ["build.json: is missing"]),
    "the array's metadata": (lost("latents/zarr.json"), [], ["latents/zarr.json: is missing"]),
    "the spec": (lost("zarr.json"), [], [SPEC_LOST]),
    "the spec, damaged": (flipped("zarr.json"), [], ["zarr.json"]),
    "the spec of another recipe": (copied("recipe", "zarr.json", "latents/zarr.json"), [], ["zarr.json", "zarr.json"]),
    "spec, seal and plan": (lost("zarr.json", "seal.json", "plan.parquet"), [], [SPEC_LOST, PLAN]),
    "spec, beside a foreign seal": (together(OTHER_SEAL, lost("zarr.json")), [], [SPEC_LOST]),
    "spec and plan, beside it": (together(OTHER_SEAL, lost("zarr.json", "plan.parquet")), [], [SPEC_LOST, PLAN]),
    "spec and samples, beside it": (together(OTHER_SEAL, lost("zarr.json", TABLE)), [1], [AGAIN, SPEC_LOST]),
    "all metadata but the plan": (lost("zarr.json", "latents/zarr.json", "build.json"), [], ["zarr", "build.json"]),
}


@pytest.mark.parametrize("what", MENDED)
def test_the_next_build_mends_damage_to_the_same_bytes(built, what):
    """It says what it found, and builds no other shard again."""
    damage, rebuilt, said = MENDED[what]
    with built.same_in_the_end():
        damage(built)
        before = places(built.cache)
        message = built.build()
        after = places(built.cache)
    shards = [f"latents/c/{shard}/0/0/0" for shard in range(3)]
    assert [number for number, name in enumerate(shards) if after[name] != before.get(name)] == rebuilt
    notes = [line for line in message.splitlines() if "damage found" in line]
    assert len(notes) == len(said), notes
    for note, words in zip(notes, said, strict=True):
        assert words in note
    assert ("the seal was not that of these shards" in message) is ("foreign seal" in what or "beside it" in what)


RERUN, REPAIR = "rerun the", "precompute repair"
UNFINISHED = lost("seal.json", *OTHER_SHARD)
"""As a build that was killed leaves a cache: nothing of the last shard, no seal."""

FILES = {SHARD: 1, "samples/000002.parquet": 2, "commits/000000.json": 0, "plan.parquet": None, "seal.json": None}
FILES |= {"latents/zarr.json": None}
NAMED: dict[str, tuple[Act, int | None, list[str]]] = {
    **{f"{name}, lost": (lost(name), shard, [REPAIR]) for name, shard in FILES.items()},
    **{f"{name}, flipped": (flipped(name), shard, [REPAIR]) for name, shard in FILES.items()},
    "the spec, lost": (lost("zarr.json"), None, [REPAIR, "verify again:"]),
    "the spec, flipped": (flipped("zarr.json"), None, [REPAIR, "verify again:"]),
    "half built, a flipped shard": (together(UNFINISHED, flipped(SHARD)), 1, [RERUN, REPAIR]),
    "half built, a flipped samples table": (together(UNFINISHED, flipped(TABLE)), 1, [RERUN, REPAIR]),
    "half built, a flipped record": (together(UNFINISHED, flipped(RECORD)), 1, [RERUN, REPAIR]),
    "no build record": (lost("build.json"), None, [RERUN]),
    "neither build record nor seal": (lost("build.json", "seal.json"), None, [RERUN]),
    "no build record, no samples table": (lost("build.json", TABLE), 1, [RERUN, REPAIR]),
    "a foreign seal and no spec": (together(OTHER_SEAL, lost("zarr.json")), None, [REPAIR, "verify again:"]),
}
"""Damage, the shard that it concerns, and the steps that a verification names."""


@pytest.mark.parametrize("what", NAMED)
def test_what_verify_names_is_repaired_to_the_same_bytes(built, what):
    """By the steps that it names, to the letter, where names need quotes; no sound shard is built again."""
    built.cache = built.cache.rename(built.folder / "my cache")
    damage, damaged, expected = NAMED[what]
    with built.same_in_the_end():
        damage(built)
        steps, before = json.loads(built.report().read_text())["next"], places(built.cache)
        for step in steps:
            if step.startswith("rerun the `precompute build`"):
                built.build()
                before = places(built.cache)
            elif step.startswith("precompute "):
                built.run(main, *shlex.split(step)[1:])
    assert [" ".join(step.split()[:2]) for step in steps] == expected
    after = places(built.cache)
    for name in (f"latents/c/{shard}/0/0/0" for shard in range(3) if shard != damaged):
        assert after[name] == before[name]


RECORDS = [f"commits/{shard:06d}.json" for shard in range(3)]


@pytest.mark.parametrize(
    ("names", "shards"), [(["seal.json"], "1"), (["seal.json"], "[0, 1, 2]"), (RECORDS, "[0, 1, 2]")]
)
def test_where_seal_and_records_disagree_a_shard_may_be_either(built, names, shards):
    with built.same_in_the_end():
        copied("images", *names)(built)
        message = built.repair("--shards", shards)
    assert ("the seal was not that of these shards" in message) is (names == ["seal.json"])


def test_a_foreign_shard_that_nobody_named_is_repaired_too(built):
    with built.same_in_the_end():
        copied("images", *OTHER_SHARD)(built)
        flip(built.cache / SHARD)
        built.repair("--shards", "1")


def edit(path: Path) -> None:
    """Another digit in a record's time."""
    seconds = re.compile(rb'(?<="seconds":)\d')
    path.write_bytes(seconds.sub(lambda digit: b"%d" % (9 - int(digit[0])), path.read_bytes()))


def assert_left(project: Project, before: dict[str, bytes], message: str, by_table: bool) -> None:
    """Nothing of shard 1 was replaced, and the shard is named; the sample is where its samples table can be read."""
    assert "1 shard built again would not come out as before, so that nothing was replaced: 1\n" in message
    assert ("image of sample-009" in message) is by_table
    assert ("an image may have changed unseen" in message) is not by_table
    now = contents(project)
    assert now.keys() >= before.keys()
    for name in (SHARD, "shards/000001.tar", TABLE, RECORD, "seal.json", "plan.parquet", "zarr.json"):
        assert now.get(name) == before.get(name)


def contents(project: Project) -> dict[str, bytes]:
    return {name: (project.cache / name).read_bytes() for name in places(project.cache)}


@pytest.mark.parametrize(
    ("command", "name", "damage", "sealed"),
    [
        ("repair --shards [0,1]", TABLE, flip, True),
        ("repair --shards [0,1]", TABLE, Path.unlink, False),
        ("repair --shards [0,1]", RECORD, Path.unlink, True),
        ("build", TABLE, Path.unlink, True),
        ("build", TABLE, Path.unlink, False),
        ("build", RECORD, edit, True),
    ],
)
def test_a_shard_that_comes_out_otherwise_stays_as_it_was(built, command, name, damage, sealed):
    """The seal says what it was, or its own record; nothing that can be trusted remembers its images.

    Restoring the image mends it; doing as the message says takes the shard as it is now.
    """
    with built.same_in_the_end():
        if not sealed:
            built.lose("seal.json")
        damage(built.cache / name)
        damaged = contents(built)
        other_image(9)(built)
        for _ in range(2):  # as every night
            message = built.do(command, code=1)
            assert_left(built, damaged, message, by_table=(name, damage) != (TABLE, Path.unlink))
        taken = Path(shutil.copytree(built.cache, built.folder / "taken"))
        for vouching in re.findall(r"delete (.*) in .*, then precompute build --config", message)[0].split(", "):
            (taken / vouching).unlink()
        built.build(name="taken")
        assert not verify(taken, "full").findings
        built.has()
        assert "identity was" not in built.do(command)


def test_two_workers_leave_such_a_tar_and_build_the_others(project):
    tars = {"store__format": "webdataset"}
    project.build(**tars)
    with project.same_in_the_end():
        before = project.files()
        edit(project.cache / RECORD)
        project.lose("shards/000002.tar")
        damaged = contents(project)
        other_image(9)(project)
        assert_left(project, damaged, project.build(code=1, run__workers=2, **tars), by_table=True)
        assert project.files() == before
        project.has()
        project.build(**tars)


@pytest.mark.parametrize(
    ("flag", "numbers", "mended"),
    [("--extend", range(24), {}), ("--retry-rejected", range(22), {"sample_004": image_bytes(4)})],
)
def test_new_work_holds_a_damaged_shard_to_what_it_was(built, flag, numbers, mended):
    whole = built.files()
    built.lose(TABLE)
    built.has(numbers, **mended, sample_009=image_bytes(99))
    said = built.build(flag, code=1)
    assert "would not come out as before, so that nothing was replaced: 1\n" in said
    built.has(numbers, **mended)
    built.build(flag)
    assert [built.files()[name] for name in (SHARD, TABLE)] == [whole[name] for name in (SHARD, TABLE)]


def test_a_moved_cache_is_repaired_from_any_folder(project, monkeypatch):
    """Though its build had relative paths, and the report names the earlier place."""
    monkeypatch.chdir(project.folder)
    project.build(cache="cache", source__path="source/chat.json", source__images="source/images.zip")
    monkeypatch.chdir("/")
    with project.same_in_the_end():
        flip(project.cache / SHARD)
        report, moved = project.report(), project.cache.rename(project.folder / "moved")
        project.run(main, "repair", moved, "--report", report)
        moved.rename(project.cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "name what to repair"),
        ("--shards [3]", "has shards [0, 3); it has no shard 3"),
        ("--report /nowhere.json", "is not a report"),
        (f"--report {shlex.quote(__file__)}", "is not a report"),
    ],
)
def test_a_mistake_is_one_line(built, options, message):
    assert message in built.do(f"repair {options}", code=2)
    (built.folder / "empty").mkdir()
    assert "holds no cache" in built.run(main, "repair", built.folder / "empty", "--shards", "0", code=2)


@pytest.mark.parametrize("program", [["repair", "--shards", "1"], ["audit"]])
def test_what_lies_elsewhere_now_is_told_with_the_way_to_say_so(built, program):
    name, *options = program
    built.source = built.source.rename(built.folder / "elsewhere")
    built.images = built.source / "images.zip"
    said = built.run(main, name, built.cache, *options, code=1)
    (line,) = [line for line in said.splitlines() if line.startswith("precompute: error")]
    remembered = f"does not exist. So {built.cache / 'build.json'} remembers it; if it has moved, run the `precompute"
    assert remembered in line
    built.build()
    built.run(main, name, built.cache, *options)


def test_a_signed_record_in_other_bytes_is_not_sealed(built):
    """As a foreign program may write it: its content's digest is that of the bytes in the file."""
    built.lose("seal.json")
    path = built.cache / RECORD
    data = re.sub(rb'("sha256":")\w{64}("})$', rb"\1\2", path.read_bytes().replace(b'"content":{', b'"content": {  '))
    path.write_bytes(data[:-2] + hashlib.sha256(data).hexdigest().encode() + data[-2:])
    assert f"{path} is no canonical JSON (RFC 8785): delete it and run the same command again" in built.build(code=1)
    path.unlink()
    built.build()
