"""Damage, mended by a repair or by the next build: to the same bytes, or not at all."""

import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from cache_store.cache.metadata import read_commit
from precompute.cli import main
from precompute.encode.engines.local import ENCODER_THREADS
from tests.precompute.conftest import Project, flip, image_bytes, places, run_build, write_source

Damage = Callable[[Project, Path], None]
"""Of a project's cache, perhaps with files of a foreign one."""

SHARD, TABLE, RECORD = "latents/c/1/0/0/0", "samples/000001.parquet", "commits/000001.json"
"""Files of shard 1."""

ANOTHER = {"sample_009": image_bytes(99)}
"""Another image in shard 1."""


def lost(*names: str) -> Damage:
    return lambda project, _: project.lose(*names)


def flipped(name: str) -> Damage:
    return lambda project, _: flip(project.cache / name)


def other_seal(project: Project, foreign: Path) -> None:
    shutil.copy(foreign / "recipe/seal.json", project.cache)


def together(*damages: Damage) -> Damage:
    def damage(project: Project, foreign: Path) -> None:
        for each in damages:
            each(project, foreign)

    return damage


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory, vae_path: Path) -> Path:
    """A folder of caches: of the same spec from another image in each shard, and of another recipe."""
    folder = tmp_path_factory.mktemp("foreign")
    source = write_source(folder / "source", **{f"sample_{each:03d}": image_bytes(90 + each) for each in (1, 9, 17)})
    run_build(folder, source, vae_path).rename(folder / "images")
    run_build(folder, source, vae_path, image__height=40).rename(folder / "recipe")
    return folder


FILES = [SHARD, "samples/000002.parquet", "commits/000000.json", "plan.parquet"]
FILES += ["seal.json", "latents/zarr.json", "zarr.json"]


@pytest.mark.parametrize("damage", [flip, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_what_verify_names_is_repaired_to_the_same_bytes(built, name, damage):
    others = [f"latents/c/{shard}/0/0/0" for shard in range(3) if f"c/{shard}/" not in name and f"{shard}." not in name]
    before = places(built.cache)
    with built.same_in_the_end():
        damage(built.cache / name)
        built.repair("--report", built.report())
    after = places(built.cache)
    assert [after[other] for other in others] == [before[other] for other in others]


def swapped_plan(project: Project, _: Path) -> None:
    """Of which two samples have each other's image, in an unfinished cache."""
    project.lose("seal.json", "commits/000000.json", "commits/000001.json")
    plan = pq.read_table(project.cache / "plan.parquet")
    uris = plan["uri"].to_pylist()
    uris[0], uris[1] = uris[1], uris[0]
    pq.write_table(plan.set_column(2, "uri", pa.array(uris)), project.cache / "plan.parquet", row_group_size=8)


def another_digest(project: Project, _: Path) -> None:
    """One digit of the plan's digest, in an unsealed cache."""
    project.lose("seal.json")
    text = (project.cache / "zarr.json").read_text()
    place = text.index('"plan_digest"') + len('"plan_digest": "') + 3
    (project.cache / "zarr.json").write_text(text[:place] + ("0" if text[place] != "0" else "1") + text[place + 1 :])


PLAN = "plan.parquet is written again"
MENDED_BY_A_BUILD = {
    "a shard": (lost(SHARD), "shard 1 is built again"),
    "the spec, damaged": (flipped("zarr.json"), "zarr.json"),
    "a digit of the plan's digest": (another_digest, "zarr.json: is not what the spec says"),
    "a swapped plan, never followed": (swapped_plan, PLAN),
    "the plan": (lost("plan.parquet"), PLAN),
    "the seal": (lost("seal.json"), ""),
    "the build record": (lost("build.json"), "build.json: is missing"),
    "the array's metadata": (lost("latents/zarr.json"), "latents/zarr.json: is missing"),
    "the spec": (lost("zarr.json"), "zarr.json: is missing"),
    "spec and seal": (lost("zarr.json", "seal.json"), "zarr.json: is missing"),
    "spec and plan": (lost("zarr.json", "plan.parquet"), PLAN),
    "spec, seal and plan": (lost("zarr.json", "seal.json", "plan.parquet"), PLAN),
    "spec, beside another cache's seal": (together(other_seal, lost("zarr.json")), "zarr.json: is missing"),
    "spec and plan, beside it": (
        together(other_seal, lost("zarr.json", "plan.parquet")),
        "plan.parquet is written again",
    ),
    "spec and record, beside it": (together(other_seal, lost("zarr.json", "commits/000000.json")), "zarr.json"),
    "spec and samples, beside it": (together(other_seal, lost("zarr.json", TABLE)), "shard 1 is built again"),
    "all metadata but the plan": (lost("zarr.json", "latents/zarr.json", "build.json"), "zarr.json: is missing"),
}


@pytest.mark.parametrize("what", MENDED_BY_A_BUILD)
def test_what_is_lost_comes_back_with_the_next_build(built, foreign, what):
    damage, said = MENDED_BY_A_BUILD[what]
    with built.same_in_the_end():
        damage(built, foreign)
        message = built.build()
    assert said in message
    assert ("plan.parquet is written again" in message) is (said == PLAN)


@pytest.mark.parametrize("shards", ["1", "[0, 1, 2]"])
def test_a_foreign_seal_is_replaced_and_no_shard_blamed(built, foreign, shards):
    with built.same_in_the_end():
        shutil.copy(foreign / "images/seal.json", built.cache)
        message = built.repair("--shards", shards)
    assert "the seal was not that of these shards" in message
    assert "other bytes" not in message


def test_a_foreign_shard_that_nobody_named_is_repaired_too(built, foreign):
    with built.same_in_the_end():
        for name in ("latents/c/2/0/0/0", "samples/000002.parquet", "commits/000002.json"):
            shutil.copy(foreign / "images" / name, built.cache / name)
        flip(built.cache / SHARD)
        built.repair("--shards", "1")


UNFINISHED = lost("seal.json", "commits/000002.json", "samples/000002.parquet", "latents/c/2/0/0/0")
"""As a build that was killed leaves a cache: nothing of the last shard, no seal."""


def unfinished_and_flipped(name: str) -> Damage:
    return together(UNFINISHED, flipped(name))


RERUN, REPAIR = "rerun the", "precompute repair"

STEPS = {
    "half built, a flipped shard": (unfinished_and_flipped(SHARD), [RERUN, REPAIR]),
    "half built, a flipped samples table": (unfinished_and_flipped(TABLE), [RERUN, REPAIR]),
    "half built, a flipped record": (unfinished_and_flipped(RECORD), [RERUN, REPAIR]),
    "no seal": (lost("seal.json"), [REPAIR]),
    "no build record": (lost("build.json"), [RERUN]),
    "neither": (lost("build.json", "seal.json"), [RERUN]),
    "another cache's seal and no spec": (together(other_seal, lost("zarr.json")), [REPAIR, "verify again:"]),
    "no build record, no samples table": (lost("build.json", TABLE), [RERUN, REPAIR]),
}


@pytest.mark.parametrize("damage", STEPS)
def test_the_steps_that_verify_names_mend_the_cache(built, foreign, damage):
    """Taken in their order and to the letter, where names need quotes."""
    built.cache = built.cache.rename(built.folder / "my cache")
    spoil, expected = STEPS[damage]
    with built.same_in_the_end():
        spoil(built, foreign)
        steps = json.loads(built.report().read_text())["next"]
        for step in steps:
            if step.startswith("rerun the `precompute build`"):
                built.build()
            elif step.startswith("precompute "):
                built.run(main, *shlex.split(step)[1:])
    assert [" ".join(step.split()[:2]) for step in steps] == expected


def test_a_repair_builds_what_was_only_missing_once(built, foreign):
    """By itself, or before it by the build."""
    for is_built_before in (False, True):
        with built.same_in_the_end():
            unfinished_and_flipped(SHARD)(built, foreign)
            report = built.report()
            missing = built.build() and read_commit(built.cache, 2) if is_built_before else None
            built.repair("--report", report)
        assert missing in (None, read_commit(built.cache, 2))


def edit(path: Path) -> None:
    """Another digit in a record's time."""
    seconds = re.compile(rb'(?<="seconds":)\d')
    path.write_bytes(seconds.sub(lambda digit: b"%d" % (9 - int(digit[0])), path.read_bytes()))


def shard_files(project: Project) -> dict[str, bytes]:
    """Of shard 1, and what the whole cache stands on."""
    names = (SHARD, "shards/000001.tar", TABLE, RECORD, "seal.json", "plan.parquet", "zarr.json")
    return {name: (project.cache / name).read_bytes() for name in names if (project.cache / name).exists()}


def assert_named(message: str, by_table: bool) -> None:
    """The shard is; the sample is where its samples table can be read."""
    assert "1 shards built again do not come out as they were, so that nothing of them was replaced: 1\n" in message
    assert ("image of sample-009" in message) is by_table
    assert ("an image may have changed unseen" in message) is not by_table


def act(project: Project, command: str, code: int = 0) -> str:
    return project.repair("--shards", "[0, 1]", code=code) if command == "repair" else project.build(code=code)


@pytest.mark.parametrize(
    ("command", "name", "damage", "sealed"),
    [
        ("repair", TABLE, flip, True),
        *((command, TABLE, Path.unlink, sealed) for command in ("repair", "build") for sealed in (True, False)),
        *((command, RECORD, damage, True) for command in ("repair", "build") for damage in (edit, Path.unlink)),
    ],
)
def test_a_shard_that_comes_out_otherwise_stays_as_it_was(built, command, name, damage, sealed):
    """The seal says what it was, or its own record; nothing that can be trusted remembers its images."""
    with built.same_in_the_end():
        if not sealed:
            built.lose("seal.json")
        damage(built.cache / name)
        names, damaged = built.files().keys(), shard_files(built)
        built.has(**ANOTHER)
        for _ in range(2):  # as every night
            message = act(built, command, code=1)
            assert_named(message, by_table=(name, damage) != (TABLE, Path.unlink))
            assert sealed or f"delete commits/000001.json in {built.cache}, then precompute build" in message
            assert shard_files(built) == damaged
            assert built.files().keys() >= names
        built.has()
        assert "identity was" not in act(built, command)


@contextmanager
def two_workers() -> Iterator[None]:
    """Threads enough that a repair on a CPU takes two processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2 * ENCODER_THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def test_two_workers_leave_such_a_tar_and_repair_the_others(project):
    project.build(store__format="webdataset")
    with project.same_in_the_end():
        before = project.files()
        edit(project.cache / RECORD)
        flip(project.cache / "shards/000002.tar")
        damaged = shard_files(project)
        project.has(**ANOTHER)
        with two_workers():
            assert_named(project.repair("--shards", "[1, 2]", code=1), by_table=True)
        assert shard_files(project) == damaged
        assert project.files() == before
        project.has()
        project.repair("--shards", "1")


@pytest.mark.parametrize("command", ["repair", "build"])
def test_what_was_refused_can_be_taken_as_another_cache(built, command):
    """In the way that the message says."""
    flip(built.cache / SHARD)
    built.lose(TABLE)
    built.has(**ANOTHER)
    said = f"delete seal.json, commits/000001.json in {built.cache}, then precompute build --config"
    assert said in act(built, command, code=1)
    built.lose("seal.json", RECORD)
    built.build()
    with built.same_in_the_end():
        pass


def test_a_repair_that_stops_halfway_has_forgotten_nothing(built, at_second_batch):
    """The next one refuses another image as this one would have."""
    with built.same_in_the_end():
        built.lose(TABLE)
        damaged = shard_files(built)
        at_second_batch.append(lambda: os.kill(os.getpid(), signal.SIGTERM))
        built.repair("--shards", "1", code=3)
        assert shard_files(built) == damaged
        built.has(**ANOTHER)
        assert_named(built.repair("--shards", "1", code=1), by_table=False)
        built.has()
        built.repair("--shards", "1")


def test_a_moved_cache_is_repaired_by_its_old_report(built):
    with built.same_in_the_end():
        flip(built.cache / SHARD)
        report = built.report()
        built.cache.rename(built.folder / "moved")
        built.run(main, "repair", built.folder / "moved", "--report", report)
        (built.folder / "moved").rename(built.cache)


def test_a_report_of_another_cache_is_refused(built, foreign):
    flip(built.cache / SHARD)
    report = built.report()
    shutil.copy(foreign / "images/seal.json", built.cache)
    with built.untouched():
        message = built.repair("--report", report, code=1)
    assert f"the report is not one of {built.cache} as it is" in message
    assert f"cache-store verify {built.cache} --level full --report FILE" in message


@pytest.mark.parametrize("shards", ["1", "[1]"])
def test_relative_paths_of_a_build_are_found_from_any_folder(project, monkeypatch, shards):
    monkeypatch.chdir(project.folder)
    source = {"source__path": "source/chat.json", "source__images": "source/images.zip"}
    project.build(cache="cache", **source)
    monkeypatch.chdir("/")
    with project.same_in_the_end():
        flip(project.cache / SHARD)
        project.repair("--shards", shards)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name what to repair"),
        (["--shards", "[7]"], "has shards [0, 3); it has no shard 7"),
        (["--report", "/nowhere.json"], "is not a report"),
        (["--report", __file__], "is not a report"),
    ],
)
def test_a_mistake_is_one_line(built, options, message):
    assert message in built.repair(*options, code=2)


def test_a_folder_without_a_cache_is_not_repaired(project):
    project.cache.mkdir()
    assert "holds no cache" in project.repair("--shards", "0", code=2)


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
