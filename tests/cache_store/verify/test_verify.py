"""What verification looks at, says and answers; tests/cache_store/verify/damage holds that it finds all damage."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cli import main
from cache_store.verify.findings import Level
from cache_store.verify.subset import parse_subset
from cache_store.verify.verify import verify
from tests.cache_store.conftest import flip, shard_name
from tests.make_cache import make_cache

TARS = {"store_format": "webdataset"}


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "lz4"},
        {"codec": "zstd"},
        {"dtype": "bfloat16"},
        {"dtype": "float32"},
        {"store_format": "webdataset"},
        {},
    ],
    ids=str,
)
def test_a_sound_cache_with_a_rejected_shard_has_no_findings(tmp_path, latents, options):
    path = make_cache(tmp_path / "cache", latents, rejected=range(8, 16), **options)
    for level in get_args(Level):
        report = verify(path, level)
        assert (report.findings, report.shards, report.covered, report.samples) == ((), 4, 4, 22)


def in_subset(text: str, shards: int) -> list[int]:
    subset = parse_subset(text)
    return [shard for shard in range(shards) if shard in subset]


@pytest.mark.parametrize("slices", [1, 2, 3, 7, 20, 100])
@pytest.mark.parametrize("shards", [1, 4, 19, 2_441])
def test_slices_cover_every_shard_once_and_are_of_a_size(slices, shards):
    covered = [in_subset(f"{number}/{slices}", shards) for number in range(1, slices + 1)]
    assert sorted(shard for each in covered for shard in each) == list(range(shards))
    assert max(map(len, covered)) - min(map(len, covered)) <= 4


def test_a_slice_is_spread_and_a_share_is_the_first_slices():
    assert max(np.diff(in_subset("3/20", 2_441))) <= 40
    assert {shard % 4 for shard in in_subset("3/20", 2_441)} == {0, 1, 2, 3}
    assert in_subset("5%", 500) == in_subset("1/20", 500)
    assert set() < set(in_subset("2.5%", 500)) < set(in_subset("5%", 500))
    assert in_subset("100%", 7) == list(range(7))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(([f"--subset={text}"], "slice N/M") for text in ("0/20", "21/20", "3/0", "1.5/3", "x", "", "0%", "101%")),
        *(([f"--subset={text}"], "slice N/M") for text in ("-5%", "5", "5 %", "1e1%", "٣/٥")),
        *(([f"--jobs={jobs}"], "jobs must be") for jobs in ("0", "-1", "1000000", "many")),
        (["--level=quick", "--subset=1/2"], "leave subset out"),
    ],
)
def test_a_wrong_subset_or_number_of_jobs_is_refused_in_one_line(capsys, options, message):
    assert main(["verify", "anywhere", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_subset_is_read_in_full_and_the_rest_quickly(cache):
    read, unread = (shard_name(cache, in_subset(half, 4)[0]) for half in ("1/2", "2/2"))
    for name in (read, unread):
        flip(cache / name, 700)
    report = verify(cache, "full", subset=parse_subset("1/2"))
    assert ({finding.file for finding in report.findings}, report.subset, report.covered) == ({read}, "1/2", 2)
    (cache / unread).unlink()
    found = {finding.file for finding in verify(cache, "full", subset=parse_subset("1/2")).findings}
    assert found == {read, unread}


def test_a_night_after_night_of_slices_covers_every_sample(cache):
    reports = [verify(cache, "full", subset=parse_subset(f"{number}/3")) for number in (1, 2, 3)]
    whole = verify(cache, "full")
    for field in ("covered", "samples", "bytes"):
        assert sum(getattr(report, field) for report in reports) == getattr(whole, field)


def test_a_subset_means_level_full_also_where_it_has_no_shard(cache, capsys):
    assert main(["verify", str(cache), "--subset", "1/2"]) == 0
    assert "sound (full, subset 1/2): 2 of 4 shards" in capsys.readouterr().out
    assert main(["verify", str(cache), "--subset", "3/20"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "no shard falls into 3/20 of 4 shards: all were checked as by quick"
    assert second.startswith("sound (full, subset 3/20): 0 of 4 shards, 0 samples")


def test_any_number_of_jobs_gives_the_same_report(cache):
    for shard in (0, 2, 3):
        flip(cache / shard_name(cache, shard), 700)
    flip(cache / "samples/000001.parquet", 50)
    one, three = (verify(cache, "deep", jobs=jobs) for jobs in (1, 3))
    assert one == three
    assert len(one.findings) > 4


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_with_code_3(latents, tmp_path, jobs, number):
    cache, report = make_cache(tmp_path / "cache", latents, samples_per_shard=1), tmp_path / "report.json"
    command = ["verify", str(cache), "--level", "full", "--jobs", jobs, "--report", str(report)]
    program = [sys.executable, "-u", "-c", STOPPED_AT_THE_FIRST_SHARD, str(int(number)), *command]
    process = subprocess.run(program, capture_output=True, text=True, timeout=120, start_new_session=True)
    assert process.returncode == 3, process.stderr
    assert "cache-store: stopped: nothing was changed" in process.stderr
    assert "Traceback" not in process.stderr
    assert not report.exists()


STOPPED_AT_THE_FIRST_SHARD = """
import os, sys
from cache_store.verify import command as verify_command
from cache_store import open_cache
from cache_store.cli import main

class StoppingBar(verify_command.ReadingBar):
    def __call__(self, checked):
        os.kill(os.getpid(), int(sys.argv[1]))

verify_command.ReadingBar = StoppingBar
if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
"""


def test_exit_code_and_report_say_what_was_found_and_what_to_run(cache, tmp_path, capsys):
    folder, path = cache.rename(tmp_path / "my cache; really"), tmp_path / "my report.json"
    assert main(["verify", str(folder)]) == 0
    assert "sound (quick): 4 shards, 27 samples" in capsys.readouterr().out
    name = shard_name(folder, 1)
    flip(folder / name, 700)
    assert main(["verify", str(folder), "--subset", "100%", "--report", str(path)]) == 1
    report, step = json.loads(path.read_text()), capsys.readouterr().out.splitlines()[-1].removeprefix("next: ")
    assert report.items() >= {"level": "full", "subset": "100%", "shards": 4, "covered": 4}.items()
    assert [(finding["shard"], finding["file"]) for finding in report["findings"]] == [(1, name)] * 2
    assert report["identity"] == open_cache(folder).seal.identity
    assert report["next"] == [step]
    assert shlex.split(step) == ["precompute", "repair", str(folder), "--report", str(path)]


@pytest.mark.parametrize(
    "name", ["left over", "two\nlines", "it's \x1b[31mred\\", os.fsdecode(b"no \xff text")], ids=ascii
)
def test_any_name_is_one_line_that_bash_takes_back(cache, capsys, name):
    stray = cache / "samples" / name
    stray.touch()
    assert main(["verify", str(cache)]) == 1
    header, row, summary, step = capsys.readouterr().out.splitlines()
    assert row.rstrip().endswith("does not belong here")
    assert all(line.isprintable() for line in (header, row, summary, step))
    path = step.removeprefix("next: delete ").removesuffix(", unless a build is running")
    subprocess.run(["bash", "-c", f"rm -- {path}"], check=True)
    assert not stray.exists()


def test_findings_are_sorted_by_shard_file_and_row(cache):
    for shard in (3, 0, 2):
        flip(cache / shard_name(cache, shard), 700)
    (cache / "build.json").unlink()
    places = [(finding.file[:5], finding.shard, finding.row is not None) for finding in verify(cache, "full").findings]
    of_shards = [(shard_name(cache, 0)[:5], shard, is_row) for shard in (0, 2, 3) for is_row in (False, True)]
    assert places == [("build", None, False), *of_shards]


def lose(*names: str) -> Callable[[Path], object]:
    return lambda cache: [(cache / name).unlink() for name in names]


def put(name: str, *lost: str) -> Callable[[Path], object]:
    """A file of a byte, in place of whatever has that name or lies below it."""

    def damage(cache: Path) -> None:
        if (cache / name).is_dir():
            shutil.rmtree(cache / name)
        (cache / name).write_bytes(b"{")
        lose(*lost)(cache)

    return damage


SCRATCH = "samples/.000001.parquet.1.partial"
REPAIR = "write the findings down with --report FILE, then precompute repair {} --report FILE"
RERUN = "rerun the `precompute build` or `cache-store convert` that made the cache: it "


@pytest.mark.parametrize(
    ("damage", "said", "steps"),
    [
        (put(SCRATCH), [SCRATCH], [f"delete {{}}/{SCRATCH}, unless a build is running"]),
        (lose("plan.parquet"), ["plan.parquet", "is missing"], [REPAIR]),
        (lose("seal.json"), ["seal.json", "is missing: the cache is not sealed"], [REPAIR]),
        (lose("commits/000002.json"), ["is missing, though the cache is sealed"], [REPAIR]),
        (
            lose("seal.json", "commits/000002.json"),
            ["is missing: the cache is not sealed", "unfinished: 1 of 4 shards are not committed"],
            [f"{RERUN}builds what is missing"],
        ),
        (lose("zarr.json"), [], [REPAIR, "verify again: without zarr.json nothing else could be checked"]),
        (put("commits"), [], ["delete {}/commits, unless a build is running", REPAIR]),
        (
            put("build.json", "plan.parquet"),
            [],
            [RERUN + "writes build.json again, which repair needs", REPAIR],
        ),
    ],
    ids=lambda value: value[0][:30] if isinstance(value, list) and value else "",
)
def test_what_mends_the_damage_is_said_first_things_first(cache, capsys, damage, said, steps):
    damage(cache)
    assert main(["verify", str(cache)]) == 1
    out = capsys.readouterr().out
    assert all(words in out for words in said)
    found = [line.removeprefix("next: ") for line in out.splitlines() if line.startswith("next: ")]
    assert found == [step.format(cache) for step in steps]


def test_another_spec_than_the_records_have_blames_no_shard(cache):
    spec = cache / "zarr.json"
    spec.write_bytes(spec.read_bytes().replace(b'"fit":"squash"', b'"fit":"squasH"'))
    (cache / "seal.json").unlink()
    assert [finding.file for finding in verify(cache, "full").findings] == ["zarr.json"]


def test_a_report_says_of_every_finding_what_kind_it_is(cache, tmp_path):
    """So that no program need look at texts, which are for people."""
    lose("seal.json", "commits/000001.json", "build.json")(cache)
    (cache / "build.json").mkdir()
    for name in ("commits/000002.json", "samples/.left.partial"):
        put(name)(cache)
    main(["verify", str(cache), "--report", str(tmp_path / "report.json")])
    findings = json.loads((tmp_path / "report.json").read_text())["findings"]
    assert {finding["file"]: finding["kind"] for finding in findings} == {
        "build.json": "replaced",
        "commits/000001.json": "uncommitted",
        "commits/000002.json": "damaged",
        "samples/.left.partial": "stray",
        "seal.json": "unsealed",
    }


def test_no_cache_and_one_of_a_newer_format_are_refused_by_name(cache, tmp_path, capsys):
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    assert "holds no cache" in capsys.readouterr().err
    spec = cache / "zarr.json"
    spec.write_bytes(spec.read_bytes().replace(b'"format_version":1', b'"format_version":2'))
    assert main(["verify", str(cache)]) == 1
    assert "format version 2; this program reads version 1" in capsys.readouterr().err


def test_a_folder_may_be_named_from_home(cache, monkeypatch):
    monkeypatch.setenv("HOME", str(cache.parent))
    assert main(["verify", "~/cache"]) == 0
    assert main(["info", "~/cache"]) == 0


def test_progress_hears_of_every_shard_once(cache):
    heard: Counter[int] = Counter()
    verify(cache, "full", progress=lambda checked: heard.update([checked.task.shard]))
    assert heard == Counter(range(4))
