"""Damage is mended by a repair: to the same bytes, or not at all."""

import re
import shlex
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cache_store.verify.verify import verify
from precompute.cli import main
from tests.precompute.acts import RECORD, SHARD, TABLE, other_image
from tests.precompute.conftest import Project, flip


def test_a_repair_reads_the_shards_of_its_report_again_and_keeps_what_is_sound_now(built):
    others = "latents/40x32/c/0/0/0/0", "latents/40x32/c/2/0/0/0"
    with built.same_in_the_end():
        for name in (SHARD, *others):
            flip(built.cache / name)
        report = built.report()
        for name in others:
            flip(built.cache / name)
        kept = [(built.cache / name).stat().st_mtime_ns for name in others]
        assert "2 shards of the report found sound now, and kept: 0, 2\n" in built.repair("--report", report)
        assert [(built.cache / name).stat().st_mtime_ns for name in others] == kept


def edit(path: Path) -> None:
    """Change a digit of a record's time."""
    seconds = re.compile(rb'(?<="seconds":)\d')
    path.write_bytes(seconds.sub(lambda digit: b"%d" % (9 - int(digit[0])), path.read_bytes()))


def flip_last_column(path: Path) -> None:
    """Flip a bit of a table so that its ids can still be read."""
    group, data = pq.read_metadata(path).row_group(0), bytearray(path.read_bytes())
    column = group.column(group.num_columns - 1)
    data[(column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size - 1] ^= 1
    path.write_bytes(data)


def assert_left(project: Project, before: dict[str, bytes], message: str, by_table: bool) -> None:
    """Check that shard 1 was named and not replaced, and its sample named if the samples table is readable."""
    assert ": 1\n" in message
    assert ("sample-009" in message) is by_table
    now = project.place.files()
    assert now.keys() >= before.keys()
    for name in (SHARD, "shards/000001.tar", TABLE, RECORD, "seal.json", "plan/000000.parquet", "zarr.json"):
        assert now.get(name) == before.get(name)


@pytest.mark.parametrize(
    ("command", "name", "damage", "sealed"),
    [
        ("repair --shards [0,1]", TABLE, flip_last_column, True),
        ("repair --shards [0,1]", TABLE, Path.unlink, False),
        ("repair", RECORD, edit, True),
    ],
)
def test_a_shard_that_comes_out_otherwise_stays_as_it_was(built, command, name, damage, sealed):
    """Its seal or record knows its content, but nothing trusted knows its images.

    Restoring the image mends it; following the message accepts the shard as it is now.
    """
    with built.same_in_the_end():
        if not sealed:
            built.lose("seal.json")
        damage(built.cache / name)
        damaged = built.place.files()
        other_image(9)(built)
        for _ in range(2):  # as a nightly job would
            message = built.do(command, code=1)
            assert_left(built, damaged, message, by_table=(name, damage) != (TABLE, Path.unlink))
        taken = Path(shutil.copytree(built.cache, built.folder / "taken"))
        for vouching in re.findall(r"delete (.*) in .*, then run precompute build --config", message)[0].split(", "):
            (taken / vouching).unlink()
        built.build(name="taken")
        assert not verify(taken, "full").findings
        built.has()
        built.do(command)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("build", name) for name in (RECORD, "zarr.json", "latents/40x32/zarr.json", "seal.json", "shards.bin")),
        ("build --extend", "plan/000000.parquet"),
        ("build --retry-rejected", TABLE),
        ("build --check-sources", RECORD),
    ],
)
def test_no_other_command_mends_and_all_name_the_one_that_does(built, command, name):
    """What is damaged is said before the source is looked at."""
    with built.same_in_the_end():
        data = built.place.read(name)
        built.place.put(name, data[:-9])
        with built.unchanged():
            said = built.do(command, code=1)
        assert name.removeprefix("samples/").removeprefix("plan/") in said
        built.run(main, *shlex.split(said.rpartition("run: precompute ")[2]))


def test_a_moved_cache_is_repaired_from_any_folder(project, monkeypatch):
    """Its build had relative paths, and the report names the old place."""
    monkeypatch.chdir(project.folder)
    project.build(cache="cache", source__path="source/chat.json", source__images="source/images.zip")
    monkeypatch.chdir("/")
    with project.same_in_the_end():
        flip(project.cache / SHARD)
        report, moved = project.report(), project.cache.rename(project.folder / "moved")
        project.run(main, "repair", moved, "--report", report)
        moved.rename(project.cache)


@pytest.mark.parametrize("program", [["repair", "--shards", "1"], ["audit"]])
def test_what_lies_elsewhere_now_is_told_with_the_way_to_say_so(built, program):
    name, *options = program
    built.source = built.source.rename(built.folder / "elsewhere")
    built.images = built.source / "images.zip"
    said = built.run(main, name, built.cache, *options, code=1)
    (line,) = [line for line in said.splitlines() if line.startswith("precompute: error")]
    assert str(built.cache / "build.json") in line
    built.build()
    built.run(main, name, built.cache, *options)
