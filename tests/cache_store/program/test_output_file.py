"""A report can be written, or it is refused before the work; and the work's result is shown before it is written."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cache_store.cli import main
from cache_store.errors import ConfigError
from cache_store.program.output_file import refuse_output, write_output
from tests.cache_store.conftest import contents

OBEYING = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
"""Makes root obey permissions like anyone else."""


def run_program(*arguments: str, obeying: bool = False, **streams: object) -> subprocess.CompletedProcess[str]:
    if obeying and os.geteuid() == 0 and shutil.which(OBEYING[0]) is None:
        pytest.skip("root obeys no permissions and there is no setpriv to make it")
    prefix = OBEYING if obeying and os.geteuid() == 0 else []
    command = [*prefix, sys.executable, "-m", "cache_store", *arguments]
    return subprocess.run(command, text=True, timeout=120, **{"capture_output": True, **streams})


@pytest.mark.parametrize("name", ["read-only/report.json", "protected.json", "link.json"])
def test_a_report_that_may_not_be_written_is_refused_at_once(cache, tmp_path, name):
    (tmp_path / "read-only").mkdir(mode=0o555)
    (tmp_path / "protected.json").touch(mode=0o444)
    (tmp_path / "link.json").symlink_to(tmp_path / "read-only/target.json")
    done = run_program("verify", str(cache), "--report", str(tmp_path / name), obeying=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"cache-store: error: report: {tmp_path / name} cannot be written: Permission denied\n"
    assert not done.stdout


def test_what_only_trying_tells_is_tried(tmp_path):
    """Root may write in /proc as far as permissions go, and cannot; a name may fit where its scratch name does not."""
    for name, target in (("loop", "loop"), ("nowhere", "no/such/folder/report.json")):
        (tmp_path / name).symlink_to(tmp_path / target)
    for path in (Path("/proc/report.json"), *(tmp_path / name for name in ("r" * 250, "loop", "nowhere"))):
        with pytest.raises(ConfigError, match=f"report: {path} cannot be written: "):
            refuse_output("report", path, tmp_path / "cache")


def test_trying_leaves_everything_as_it_is(tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    for path in ("old", "new", "link", "pipe", "/dev/stdout"):
        refuse_output("report", tmp_path / path, tmp_path / "cache")
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "old").read_bytes() == b"old"


def test_a_report_never_lands_in_the_cache(cache, tmp_path, capsys):
    (tmp_path / "alias").symlink_to(cache)
    before = contents(cache)
    for path in (cache / "seal.json", tmp_path / "alias/seal.json", cache / "samples/report.json"):
        assert main(["verify", str(cache), "--report", str(path)]) == 2
        assert f"report: {path} lies in the cache {cache}; name another place" in capsys.readouterr().err
    assert main(["verify", str(cache), "--report", str(tmp_path)]) == 2
    assert contents(cache) == before


def test_a_full_disk_at_the_end_loses_the_report_alone(cache):
    (cache / "samples/000001.parquet").unlink()
    done = run_program("verify", str(cache), "--report", "/dev/full")
    assert done.returncode == 1
    assert "samples/000001.parquet" in done.stdout
    assert f"next: precompute repair {cache} --report /dev/full" in done.stdout
    assert done.stderr == "cache-store: error: No space left on device: /dev/full\n"


def test_a_report_on_standard_output_follows_what_was_printed(cache, tmp_path):
    with (tmp_path / "out").open("w") as out:
        done = run_program("verify", str(cache), "--report", "/dev/stdout", capture_output=False, stdout=out)
    assert done.returncode == 0
    shown, brace, report = (tmp_path / "out").read_text().partition("{")
    assert shown.startswith("sound (quick)")
    assert json.loads(brace + report)["findings"] == []


def test_a_reader_that_has_gone_costs_no_report(cache, tmp_path):
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # so that the first line printed fails, as in a long output
    arguments = ["verify", str(cache), "--report", str(tmp_path / "report.json")]
    done = run_program(*arguments, capture_output=False, stdout=write, env=environment)
    os.close(write)
    assert done.returncode == 1
    assert json.loads((tmp_path / "report.json").read_text())["findings"] == []


def test_an_output_replaces_a_file_and_passes_links_and_pipes(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("file", "link", "pipe"):
        for data in (b"a longer first", b"second"):
            write_output(tmp_path / name, data)
    assert (tmp_path / "file").read_bytes() == (tmp_path / "target").read_bytes() == b"second"
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "pipe").is_fifo()
    assert os.read(reader, 100) == b"a longer firstsecond"
    os.close(reader)
