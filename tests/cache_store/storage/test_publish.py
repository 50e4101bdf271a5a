import subprocess
import sys

import pytest

from cache_store.storage.publish import clear_scratch, publish, write_file


def test_a_failed_block_leaves_neither_file_nor_scratch(tmp_path):
    with pytest.raises(RuntimeError), publish(tmp_path / "a" / "file") as stream:
        stream.write(b"half")
        raise RuntimeError
    assert list((tmp_path / "a").iterdir()) == []


def test_a_failed_block_leaves_the_earlier_file_as_it_was(tmp_path):
    write_file(tmp_path / "file", b"old")
    with pytest.raises(RuntimeError), publish(tmp_path / "file") as stream:
        stream.write(b"new")
        raise RuntimeError
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_killed_writers_scratch_is_cleared_and_counted(tmp_path):
    code = (
        "import os, sys, pathlib; from cache_store.storage.publish import publish\n"
        "with publish(pathlib.Path(sys.argv[1]), attempt=3) as stream:\n"
        "    stream.write(b'half'); stream.flush(); os.kill(os.getpid(), 9)"
    )
    path = tmp_path / "file"
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    assert not path.exists()
    assert clear_scratch(path) == 4
    assert list(tmp_path.iterdir()) == []
