"""Levels, messages and exit codes of verification; `test_findings.py` shows that it finds all damage."""

import errno
import itertools
import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_store import __version__, open_cache
from cache_store.cache.metadata import write_build
from cache_store.cli import main
from cache_store.messages import printable
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.local import LocalStore
from cache_store.storage.store import STORES
from cache_store.verify.findings import LEFTOVER
from cache_store.verify.scope import parse_slice
from cache_store.verify.verify import STRAY, clear_leftovers, verify
from tests.cache_store.conftest import flip, shard_name
from tests.cache_store.signing import edited_spec, load, save_signed
from tests.faulty_store import UnreadStore
from tests.named import assert_names


def in_slice(text: str, shards: int) -> list[int]:
    chosen = parse_slice(text)
    return [shard for shard in range(shards) if shard in chosen]


def test_slices_are_every_shard_once():
    for shards, slices in itertools.product((1, 19, 2_441), (1, 3, 20)):
        covered = [in_slice(f"{number}/{slices}", shards) for number in range(1, slices + 1)]
        assert sorted(shard for each in covered for shard in each) == list(range(shards))
        assert max(map(len, covered)) - min(map(len, covered)) <= 1


MISTAKES = [
    *([f"--subset={text}"] for text in ("0/20", "21/20", "3/0", "x", "", "5%", "٣/٥")),
    *([f"--jobs={jobs}"] for jobs in ("0", "1000000", "many")),
    *(["--subset=1/2", "--level=quick"], ["--report=s3://bucket/it"]),
]


@pytest.mark.parametrize("options", MISTAKES)
def test_a_wrong_subset_number_of_jobs_or_report_is_refused_in_one_line(capsys, options):
    assert main(["verify", "anywhere", *options]) == 2
    error = capsys.readouterr().err
    assert_names(error, options[0].removeprefix("--").partition("=")[0])
    assert error.count("\n") == 1


def test_a_subset_is_read_in_full_and_the_rest_quickly(cache, capsys):
    sound = verify(cache, "full")
    nights = [verify(cache, "full", subset=parse_slice(f"{number}/3")) for number in (1, 2, 3)]
    for field in ("covered", "samples", "bytes"):
        assert sum(getattr(night, field) for night in nights) == getattr(sound, field)
    flip(cache / shard_name(cache, 1), 700)
    assert main(["verify", str(cache), "--subset", "1/2"]) == 0
    assert "sound (full, subset 1/2): 2 of 4 shards" in capsys.readouterr().out
    flip(cache / shard_name(cache, 0), 700)
    (cache / shard_name(cache, 1)).unlink()
    found = {finding.file for finding in verify(cache, "full", subset=parse_slice("1/2")).findings}
    assert found == {shard_name(cache, 0), shard_name(cache, 1)}


def test_any_number_of_jobs_gives_the_same_sorted_report(cache):
    for shard in (3, 0, 2):
        flip(cache / shard_name(cache, shard), 700)
    seal = load(cache / "seal.json")
    save_signed(cache / "seal.json", seal | {"reasons": {}})
    shards: list[int] = []
    one = verify(cache, "deep", progress=lambda checked: shards.append(checked.task.shard))
    assert verify(cache, "deep", jobs=3) == one
    assert sorted(shards) == [0, 1, 2, 3]
    places = [(finding.shard, finding.row is not None) for finding in one.findings]
    assert places == [(None, False), *((shard, is_row) for shard in (0, 2, 3) for is_row in (False, True))]


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_with_code_3(cache, tmp_path, capsys, monkeypatch, jobs, number):
    monkeypatch.setattr(ProgressBar, "update", lambda bar, count: os.kill(os.getpid(), number))
    report = tmp_path / "report.json"
    assert main(["verify", str(cache), "--level", "full", "--jobs", jobs, "--report", str(report)]) == 3
    assert capsys.readouterr().err.startswith("cache-store: stopped: ")
    assert not json.loads(report.read_text())["sound"]


def test_exit_code_and_report_say_what_was_found_and_what_to_run(cache, tmp_path, capsys, monkeypatch):
    folder, path = cache.rename(tmp_path / "my cache; really"), tmp_path / "my report.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["verify", f"~/{folder.name}"]) == 0
    assert "sound (quick): 4 shards, 27 samples" in capsys.readouterr().out
    name = shard_name(folder, 1)
    flip(folder / name, 700)
    assert main(["verify", str(folder), "--subset", "1/1", "--report", str(path)]) == 1
    report, step = json.loads(path.read_text()), capsys.readouterr().out.splitlines()[-1].removeprefix("next: ")
    facts = {"command": "cache-store verify", "version": __version__, "sound": False, "error": None}
    assert report.items() >= {**facts, "level": "full", "subset": "1/1", "shards": 4, "covered": 4}.items()
    found = [(finding["shard"], finding["file"], finding["kind"]) for finding in report["findings"]]
    assert found == [(1, name, "damaged")] * 2
    assert report["identity"] == open_cache(folder).seal.identity
    assert report["next"] == [step]
    assert shlex.split(step) == ["precompute", "repair", str(folder), "--report", str(path)]


def test_a_cache_of_another_format_is_refused_by_name(cache, capsys):
    with edited_spec(cache) as spec:
        spec["format_version"] = 2
    assert main(["verify", str(cache)]) == 1
    assert_names(capsys.readouterr().err, "version 2 1")
    with edited_spec(cache) as spec:
        spec["format_version"] = 1
        del spec["array"]["image"]["flip"]
    assert main(["verify", str(cache)]) == 1, "the records make good for it"
    assert_names(capsys.readouterr().out, "array.image.flip")
    for record in (cache / "seal.json", *(cache / "commits").iterdir()):
        record.unlink()
    assert main(["verify", str(cache)]) == 1
    assert_names(capsys.readouterr().err, "zarr.json")


def lose(*names: str) -> Callable[[Path], object]:
    return lambda cache: [(cache / name).unlink() for name in names]


SCRATCH, RECORD = "samples/.000001.parquet.1.partial", "commits/000002.json"
RERUN, REPAIR = "`precompute build` `cache-store copy`", "precompute repair CACHE --report"
SAID: list[tuple[Callable[[Path], object], dict[str, list[str]], list[str]]] = [
    (lambda cache: (cache / SCRATCH).touch(), {"stray": [SCRATCH]}, [f"delete CACHE/{SCRATCH},"]),
    (lose("zarr.json"), {"damaged": ["zarr.json"]}, [REPAIR, "verify zarr.json"]),
    (lose("seal.json"), {"unsealed": ["seal.json"]}, [f"{RERUN} `precompute seal`"]),
    (
        lose("seal.json", RECORD),
        {"unsealed": ["seal.json"], "uncommitted": [RECORD]},
        ["1 4 shards", f"{RERUN} `precompute seal`"],
    ),
    (
        lambda cache: [shutil.rmtree(cache / "commits"), (cache / "commits").touch()],
        {"replaced": ["commits"], "damaged": [f"commits/{shard:06d}.json" for shard in range(4)]},
        ["move CACHE/commits", REPAIR],
    ),
    (
        lambda cache: [(cache / f"samples/{name}").touch() for name in "xy"],
        {"stray": ["samples/x", "samples/y"]},
        ["delete CACHE/samples/x 1 --report"],
    ),
    (
        lambda cache: write_build(cache, {}, spec_digest="0" * 64),
        {"damaged": ["build.json"]},
        [f"{RERUN} build.json"],
    ),
]


@pytest.mark.parametrize(("damage", "kinds", "steps"), SAID)
def test_what_mends_the_damage_is_said_first_things_first(cache, capsys, damage, kinds, steps):
    """Each finding also has a kind, so that programs need not parse its text."""
    damage(cache)
    assert main(["verify", str(cache)]) == 1
    said = capsys.readouterr().out.replace(str(cache), "CACHE").splitlines()
    lines = [line for line in said if line.startswith(("unfinished: ", "next: "))]
    for line, names in zip(lines, steps, strict=True):
        assert_names(line, names)
    findings = verify(cache).findings
    assert {kind: [each.file for each in findings if each.kind == kind] for kind in kinds} == kinds
    assert len(findings) == sum(map(len, kinds.values()))


@pytest.mark.parametrize("name", ["it's left over", "two\nlines", os.fsdecode(b"no \xff text")], ids=ascii)
def test_any_name_is_said_on_one_line(cache, capsys, name):
    (cache / "samples" / name).touch()
    report = cache.parent / "report.json"
    assert main(["verify", str(cache), "--report", str(report)]) == 1
    header, row, summary, step = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in (header, row, summary, step))
    assert main(["verify", str(cache), "--json"]) == 1
    printed, written = json.loads(capsys.readouterr().out), json.loads(report.read_text())
    assert [each["findings"] for each in (printed, written)] == [written["findings"]] * 2
    assert printable(written["findings"][0]["file"]) in row, "a name is spelled as in the report"
    word = step.removeprefix("next: delete ").removesuffix(", unless a build is running")
    assert shlex.split(word) == [f"{cache}/{printable(f'samples/{name}')}"]


NOT_READ = [errno.EACCES, errno.ENODATA, errno.EIO, errno.ESTALE]
"""Refused or expired credentials, answers that are cut, a failing disk, a lost mount."""
FILES_READ = ["zarr.json", "build.json", "seal.json", "plan/000000.parquet", RECORD, "samples/000002.parquet", "data"]


@pytest.mark.parametrize("name", FILES_READ)
@pytest.mark.parametrize("error", NOT_READ)
def test_what_was_not_read_is_no_damage(cache, tmp_path, capsys, monkeypatch, error, name):
    """Every command that judges stops with a line that names the file."""
    name = shard_name(cache, 2) if name == "data" else name
    monkeypatch.setitem(STORES, "unread", lambda path: UnreadStore(Path(path), name, error))
    report, there = tmp_path / "report.json", f"unread://{cache}"
    verifying = ["verify", there, "--level", "full", "--report", str(report)]
    for options in (["copy", there, str(tmp_path / "copy")], verifying):
        assert main(options) == 1
        said = capsys.readouterr()
        assert said.err.endswith(f" {os.strerror(error)}: {cache / name}\n")
        assert "repair" not in said.out
    found = json.loads(report.read_text())
    assert (found["sound"], os.strerror(error) in found["error"], found["next"]) == (False, True, [])


# What dead builds left is told from what is a user's own, and cleared.

LOOKALIKES = {
    *("samples/.000099.parquet.1.partial", "samples/.000002.parquet.partial", "samples/.000002.parquet.x.partial"),
    *("samples/000002.parquet.1.partial", "samples/.notes.1.partial", "samples/mine.partial", ".000001.1.partial"),
    *("commits/.000002.parquet.1.partial", "commits/notes.txt", "commits/features", "samples/000099.parquet"),
}


def test_scratch_is_cleared_and_what_looks_alike_is_not(cache):
    folder, _, shard = shard_name(cache, 2).rpartition("/")
    leftovers = {"plan/.000000.parquet.1.partial", ".seal.json.1.partial", "samples/.000002.parquet.1.partial"}
    leftovers |= {"commits/.000002.json.1.partial", *(f"{folder}/.{shard}.{number}.partial" for number in (1, 12))}
    strangers = LOOKALIKES | {f"{folder}/.000001.1.partial", f"{folder.partition('/')[0]}/extra"}
    for path in (cache / name for name in leftovers | strangers):
        path.mkdir() if path.name in ("features", "extra") else path.write_bytes(b"half")
    for level in ("quick", "full", "deep"):
        found = {finding.file: finding.problem for finding in verify(cache, level).findings}
        assert found == dict.fromkeys(leftovers, LEFTOVER) | dict.fromkeys(strangers, STRAY)
    clear_leftovers(LocalStore(cache), open_cache(cache).spec)
    assert {finding.file for finding in verify(cache, "full").findings} == strangers
