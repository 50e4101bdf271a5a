"""Files for the user: a report is of the run that it names; what cannot be written is refused before any work."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cache_store import __version__
from cache_store.cli import main
from cache_store.program.output_file import ReportFile, refuse_output, write_output
from cache_store.verify import command
from tests.cache_store.conftest import REJECTED, contents, flip, shard_name
from tests.make_cache import make_cache
from tests.named import assert_names

STALE = '{"sound": true, "findings": []}'


@pytest.fixture
def cache(tmp_path: Path, latents: np.ndarray) -> Path:
    return make_cache(tmp_path / "cache", latents, rejected=REJECTED)


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


def test_a_run_that_an_error_ends_or_an_unmounted_disk_leaves_a_report_of_it(cache, report, monkeypatch, capsys):
    command_line = ["verify", str(cache), "--report", str(report)]
    assert main(command_line) == 0
    keys = read(report).keys()
    monkeypatch.setattr(command, "verify", fails(OSError(errno.ESTALE, "Stale file handle", "seal.json")))
    assert main(command_line) == 1
    assert read(report).items() >= {"sound": False, "error": "Stale file handle: seal.json", "findings": []}.items()
    assert read(report).keys() == keys
    monkeypatch.undo()
    capsys.readouterr()
    cache.rename(cache.with_name("unmounted"))
    assert main([*command_line, "--json"]) == 2
    for found in (read(report), json.loads(capsys.readouterr().out)):
        assert (found["sound"], str(cache) in found["error"]) == (False, True)


KILLED = """
import os, signal, sys
from cache_store.cli import main
from cache_store.program.progress_bar import ProgressBar
ProgressBar.update = lambda bar, note: os.kill(os.getpid(), signal.SIGKILL)
main(["verify", *sys.argv[1:]])
"""


def test_a_killed_run_leaves_a_report_that_it_did_not_end(cache, report):
    done = subprocess.run([sys.executable, "-c", KILLED, str(cache), "--report", str(report)])
    assert done.returncode == -signal.SIGKILL
    assert (read(report)["sound"], "killed" in read(report)["error"]) == (False, True)


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
    assert info["spec"]["arrays"][0]["shape"] == [4, 6, 5]
    assert len(info["statistics"]["mean"]) == 4
    (cache / "seal.json").unlink()
    assert main(["info", str(cache), "--json"]) == 0
    unsealed = json.loads(capsys.readouterr().out)
    assert (unsealed["identity"], unsealed["statistics"]) == (None, None)
    assert unsealed["not_sealed_because"]


OBEYING = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
"""Makes root obey permissions like anyone else."""


REFUSED = (
    *("cache", "cache/new.json", "alias/seal.json", "read-only/new.json", "protected.json", "link.json"),
    *("r" * 250, "loop", "nowhere", "/proc/new"),  # where permissions would let root write
)
"""In the cache; without permission; too long a name for its scratch file; links and folders to nowhere."""
VERIFY_ALL = """
import sys
from cache_store.cli import main
cache, *reports = sys.argv[1:]
print([main(["verify", cache, "--report", report]) for report in reports])
"""


def test_a_report_that_may_not_be_written_is_refused_at_once(cache, tmp_path):
    if os.geteuid() == 0 and shutil.which(OBEYING[0]) is None:
        pytest.skip("root obeys no permissions and there is no setpriv to make it")
    (tmp_path / "read-only").mkdir(mode=0o555)
    (tmp_path / "protected.json").touch(mode=0o444)
    links = {"alias": "cache", "link.json": "read-only/new", "loop": "loop", "nowhere": "no/such/folder/report.json"}
    for link, target in links.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    before, paths = contents(cache), [tmp_path / name for name in REFUSED]
    command = [*(OBEYING if os.geteuid() == 0 else []), sys.executable, "-c", VERIFY_ALL, str(cache), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    for line, path in zip(done.stderr.splitlines(), paths, strict=True):
        assert_names(line, f"report: {path}")
    assert done.stdout == f"{[2] * len(paths)}\n", "codes, and nothing before them"
    assert contents(cache) == before


def run_verify(cache: Path, report: object, **streams: object) -> tuple[int, str, str]:
    """Run `cache-store verify`; return exit code, standard output and standard error."""
    command = [sys.executable, "-m", "cache_store", "verify", str(cache), "--report", str(report)]
    done = subprocess.run(command, text=True, timeout=120, **{"capture_output": True, **streams})
    return done.returncode, done.stdout, done.stderr


def test_what_was_found_is_printed_before_the_report_is_written(cache, tmp_path):
    """A full disk loses only the report; a report on standard output follows; a closed pipe loses no report."""
    with (tmp_path / "out").open("w") as out:
        assert run_verify(cache, "/dev/stdout", capture_output=False, stdout=out)[0] == 0
    shown, brace, report = (tmp_path / "out").read_text().partition("{")
    assert shown.startswith("sound (quick)")
    assert json.loads(brace + report)["findings"] == []
    (cache / "samples/000001.parquet").unlink()
    code, shown, error = run_verify(cache, "/dev/full")
    assert (code, error.count("\n")) == (2, 1), "1 would say that there is damage"
    assert_names(error, "report: /dev/full")
    assert_names(shown, f"samples/000001.parquet next: repair {cache} /dev/full")
    read, write = os.pipe()
    os.close(read)
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}  # so that the first line printed fails, as in a long output
    assert run_verify(cache, tmp_path / "report.json", capture_output=False, stdout=write, env=unbuffered)[0] == 1
    assert json.loads((tmp_path / "report.json").read_text())["findings"]
    info = [sys.executable, "-m", "cache_store", "info", str(cache)]
    ended = subprocess.run(info, stdout=write, stderr=subprocess.PIPE, env=unbuffered, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, b""), "as where SIGPIPE ends a program; 1 would say damage"


def test_an_output_replaces_a_file_and_passes_links_and_pipes(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    for name in ("file", "link", "pipe", "new", "/dev/stdout"):
        refuse_output("report", tmp_path / name, tmp_path / "cache")
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_bytes() == b"old", "trying leaves everything as it is"
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("file", "link", "pipe"):
        for data in (b"a longer first", b"second"):
            write_output(tmp_path / name, data)
    assert (tmp_path / "file").read_bytes() == (tmp_path / "target").read_bytes() == b"second"
    assert [(tmp_path / "link").is_symlink(), (tmp_path / "pipe").is_fifo()] == [True, True]
    assert os.read(reader, 100) == b"a longer firstsecond"
    os.close(reader)
