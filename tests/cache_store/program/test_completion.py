"""Scripts of shells that complete our commands."""

import sys

from cache_store.cli import main


def test_a_script_for_bash_knows_the_options_of_a_command(capsys):
    assert main(["--completion", "bash"]) == 0
    assert "--metrics" in capsys.readouterr().out


def test_another_shell_and_a_missing_library_are_one_line(capsys, monkeypatch):
    assert main(["--completion", "fish"]) == 2
    assert "one of bash, zsh, tcsh" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--completion=zsh"]) == 2
    assert "encode-once[completion]" in capsys.readouterr().err
