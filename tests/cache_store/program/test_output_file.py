"""Files for the user: a report is of the run that it names; what cannot be written is refused before any work."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cache_store.cli import main
from cache_store.verify import command
from tests.cache_store.conftest import REJECTED, contents
from tests.make_cache import make_cache
from tests.named import assert_names


@pytest.fixture
def cache(tmp_path: Path, latents: np.ndarray) -> Path:
    return make_cache(tmp_path / "cache", latents, rejected=REJECTED)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    path.write_text('{"sound": true, "findings": []}')
    return path


def read(path: Path) -> dict[str, object]:
    return json.loads(path.read_text())


def test_a_run_that_an_error_ends_or_an_unmounted_disk_leaves_a_report_of_it(cache, report, monkeypatch, capsys):
    def fail(*_, **__):
        raise OSError(errno.ESTALE, "Stale file handle", "seal.json")

    line = ["verify", str(cache), "--report", str(report)]
    assert main(line) == 0
    keys = read(report).keys()
    monkeypatch.setattr(command, "verify", fail)
    assert main(line) == 1
    assert read(report).items() >= {"sound": False, "error": "Stale file handle: seal.json", "findings": []}.items()
    assert read(report).keys() == keys
    monkeypatch.undo()
    capsys.readouterr()
    cache.rename(cache.with_name("unmounted"))
    assert main([*line, "--json"]) == 2
    for found in (read(report), json.loads(capsys.readouterr().out)):
        assert (found["sound"], str(cache) in found["error"]) == (False, True)


KILLED = """
import os, signal, sys
from cache_store.cli import main
from cache_store.program.progress_bar import ProgressBar
ProgressBar.update = lambda bar, count: os.kill(os.getpid(), signal.SIGKILL)
main(["verify", *sys.argv[1:]])
"""


def test_a_killed_run_leaves_a_report_that_it_did_not_end(cache, report):
    done = subprocess.run([sys.executable, "-c", KILLED, str(cache), "--report", str(report)])
    assert done.returncode == -signal.SIGKILL
    assert (read(report)["sound"], "killed" in read(report)["error"]) == (False, True)


def test_verify_and_info_print_json(cache, capsys):
    assert main(["verify", str(cache), "--json"]) == 0
    verified = json.loads(capsys.readouterr().out)
    assert main(["info", str(cache), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert verified.items() >= {"sound": True, "identity": info["identity"], "samples": info["cached"]}.items()
    assert (info["cached"], info["rejected"], info["committed"], info["shards"]) == (27, 3, 4, 4)
    assert (info["spec"]["arrays"][0]["shape"], len(info["statistics"]["mean"])) == ([4, 6, 5], 4)
    (cache / "seal.json").unlink()
    assert main(["info", str(cache), "--json"]) == 0
    unsealed = json.loads(capsys.readouterr().out)
    assert (unsealed["identity"], unsealed["statistics"]) == (None, None)
    assert unsealed["not_sealed_because"]


PLACES = ["cache", "alias/new.json", "link.json", "no/new", "/dev/full"]


@pytest.mark.parametrize("place", PLACES)
def test_a_report_that_cannot_be_written_is_refused_at_once(cache, tmp_path, capsys, place):
    (tmp_path / "alias").symlink_to(cache)
    (tmp_path / "link.json").symlink_to(cache / "seal.json")
    before, path = contents(cache), tmp_path / place
    assert main(["verify", str(cache), "--report", str(path)]) == 2
    assert_names(capsys.readouterr().err, f"report: {path}")
    assert contents(cache) == before


def test_a_closed_pipe_is_no_damage(cache):
    read, write = os.pipe()
    os.close(read)
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}  # so that the first line printed fails, as in a long output
    info = [sys.executable, "-m", "cache_store", "info", str(cache)]
    ended = subprocess.run(info, stdout=write, stderr=subprocess.PIPE, env=unbuffered, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, b""), "as where SIGPIPE ends a program; 1 would say damage"
