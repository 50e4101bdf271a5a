"""A nightly job never reads yesterday's report: it is of the run that it names, or says that the run did not end."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cache_store import __version__
from cache_store.cli import main
from cache_store.program.output_file import ReportFile
from cache_store.verify import command
from tests.cache_store.conftest import flip, shard_name

STALE = '{"sound": true, "findings": []}'


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    path.write_text(STALE)
    return path


def read(path: Path) -> dict[str, object]:
    return json.loads(path.read_text())


def test_a_report_says_what_was_read_when_and_whether_it_is_sound(cache, report):
    assert main(["verify", str(cache), "--level", "full", "--report", str(report)]) == 0
    sound = read(report)
    assert sound.items() >= {"command": "cache-store verify", "version": __version__, "level": "full"}.items()
    assert sound.items() >= {"sound": True, "error": None, "shards": 4, "samples": 27, "findings": []}.items()
    flip(cache / shard_name(cache, 1), 700)
    assert main(["verify", str(cache), "--level", "full", "--report", str(report)]) == 1
    damaged = read(report)
    assert (damaged["sound"], damaged["error"], len(damaged["findings"])) == (False, None, 2)
    assert damaged["time"] > sound["time"]
    assert damaged.keys() == sound.keys()


def fails(error: BaseException):
    def verify(*_, **__):
        raise error

    return verify


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.ESTALE, "Stale file handle", "seal.json"), 1, "Stale file handle: seal.json"),
        (KeyboardInterrupt(), 3, "nothing was changed; run the same command again, or slices of it with --subset"),
    ],
)
def test_a_run_that_an_error_ends_leaves_a_report_of_it(cache, report, monkeypatch, error, code, said):
    sound = ["verify", str(cache), "--report", str(report)]
    assert main(sound) == 0
    keys = read(report).keys()
    monkeypatch.setattr(command, "verify", fails(error))
    assert main(sound) == code
    assert read(report).items() >= {"sound": False, "error": said, "findings": []}.items()
    assert read(report).keys() == keys


def test_an_unmounted_disk_leaves_no_report_of_yesterday(tmp_path, report, capsys):
    for words in (["--report", str(report)], ["--json"]):
        assert main(["verify", str(tmp_path / "mnt"), *words]) == 2
    error = f"{tmp_path}/mnt holds no cache; make one with `precompute build`"
    assert read(report).items() >= {"sound": False, "error": error}.items()
    assert json.loads(capsys.readouterr().out).items() >= {"sound": False, "error": error}.items()


KILLED = """
import os, signal, sys
from cache_store.cli import main
from cache_store.verify.command import ReadingBar
ReadingBar.__call__ = lambda bar, checked: os.kill(os.getpid(), signal.SIGKILL)
main(["verify", *sys.argv[1:]])
"""


def test_a_killed_run_leaves_a_report_that_it_did_not_end(cache, report):
    done = subprocess.run([sys.executable, "-c", KILLED, str(cache), "--report", str(report)])
    assert done.returncode == -signal.SIGKILL
    assert read(report).items() >= {"sound": False, "error": "did not end: it is running, or was killed"}.items()


def test_a_report_that_cannot_be_written_is_wrong_usage_before_anything_is_read(cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "verify", fails(AssertionError("read")))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("cache_store.program.output_file.write_output", fails(full))
    assert main(["verify", str(cache), "--report", str(tmp_path / "report.json")]) == 2
    said = f"cache-store: error: report: {tmp_path}/report.json cannot be written: No space left on device\n"
    assert capsys.readouterr().err == said


def test_values_that_json_lacks_are_null(tmp_path):
    with ReportFile("verify", str(tmp_path / "report.json"), "cache", lambda error: {}) as out:
        out.result = {"sound": False, "worst": float("nan"), "largest": float("inf")}
    assert read(tmp_path / "report.json").items() >= {"worst": None, "largest": None}.items()


def test_verify_and_info_print_json(cache, capsys):
    assert main(["verify", str(cache), "--json"]) == 0
    verified = json.loads(capsys.readouterr().out)
    assert main(["info", str(cache), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert verified.items() >= {"sound": True, "identity": info["identity"], "samples": info["cached"]}.items()
    assert (info["cached"], info["rejected"], info["committed"], info["shards"]) == (27, 3, 4, 4)
    assert info["spec"]["array"]["shape"] == [4, 6, 5]
    assert len(info["statistics"]["mean"]) == 4
    (cache / "seal.json").unlink()
    assert main(["info", str(cache), "--json"]) == 0
    unsealed = json.loads(capsys.readouterr().out)
    assert (unsealed["identity"], unsealed["statistics"]) == (None, None)
    assert "is not sealed" in unsealed["not_sealed_because"]
