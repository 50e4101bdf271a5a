"""Scripts of shells that complete our commands."""

import shutil
import subprocess
import sys

import pytest

from cache_store.cli import main

COMPLETE = """
source /dev/stdin
COMP_WORDS=(cache-store verify --me) COMP_CWORD=2 COMP_LINE="cache-store verify --me" COMP_POINT=23
_shtab_cache_store cache-store --me verify
echo "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_an_option_of_a_command(capsys):
    assert main(["--completion", "bash"]) == 0
    script = capsys.readouterr().out
    done = subprocess.run(["bash", "-c", COMPLETE], input=script, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "--metrics"


def test_another_shell_and_a_missing_library_are_one_line(capsys, monkeypatch):
    assert main(["--completion", "fish"]) == 2
    assert "one of bash, zsh, tcsh" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--completion=zsh"]) == 2
    assert "encode-once[completion]" in capsys.readouterr().err
