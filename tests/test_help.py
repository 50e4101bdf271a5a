"""`--help` of every command of all three programs speaks of the command line, and fits the terminal."""

import io
from contextlib import redirect_stdout

import pytest

from cache_store import cli as cache_store
from precompute import cli as precompute
from trainer import cli as trainer

PROGRAMS = {"cache-store": cache_store, "precompute": precompute, "trainer": trainer}
PYTHON_WORDS = ("Literal[", "Optional[", "Union[", "<class", "type:", "NoneType", " None", "True", "False", "list[")

each_command = pytest.mark.parametrize(
    ("program", "command"), [(name, command) for name in PROGRAMS for command in ("", *PROGRAMS[name].COMMANDS)]
)


def help_of(program: str, command: str, columns: int = 80) -> str:
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as ended:
            PROGRAMS[program].main([*command.split(), "--help"])
    assert ended.value.code == 0
    return out.getvalue()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_without_a_command_lists_them(program, capsys):
    assert PROGRAMS[program].main([]) == 2
    first, *lines, last = capsys.readouterr().err.splitlines()
    assert first == f"{program}: error: no command was given; usage: {program} COMMAND [options]"
    assert {line.split()[0] for line in lines} == {*PROGRAMS[program].COMMANDS}
    assert last == f"{program}: run `{program} COMMAND --help` for its options"


@each_command
def test_no_python_type_and_no_line_too_long(program, command):
    for columns in (80, 120):
        text = help_of(program, command, columns)
        assert not [word for word in PYTHON_WORDS if word in text]
        assert max(map(len, text.splitlines())) <= columns


@each_command
def test_nothing_is_said_twice(program, command):
    lines = [line.rstrip(".:") for line in help_of(program, command, 250).splitlines() if line]
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize(
    ("program", "command", "usage"),
    [
        ("cache-store", "", "cache-store COMMAND [options]"),
        ("cache-store", "convert", "cache-store convert CACHE OUT --format {zarr,webdataset} [options]"),
        ("precompute", "build", "precompute build [--config FILE] [options]"),
        ("precompute", "repair", "precompute repair CACHE [options]"),
    ],
)
def test_the_usage_line_says_what_has_to_be_typed(program, command, usage):
    assert help_of(program, command).startswith(f"usage: {usage}\n\n")


@pytest.mark.parametrize(
    ("program", "command", "line"),
    [
        ("precompute", "build", "--source.kind {llava,folder,cache} llava: a chat.json"),
        ("precompute", "build", "--store.codec {none,lz4,zstd} none reads fastest"),
        ("precompute", "build", "--encoder.fold {true,false} Fold"),
        ("precompute", "build", "(default: true)"),
        ("precompute", "build", "--run.workers N|auto Processes"),
        ("precompute", "build", "--cache CACHE The cache's folder; made if it does not exist. (required)"),
        ("precompute", "repair", "--shards N|[N,…] Shards"),
        ("cache-store", "verify", "--level {quick,full,deep} quick: records"),
        ("trainer", "train", "--optim.max_grad_norm NUMBER Gradients are scaled down to this norm; null: never."),
    ],
)
def test_choices_numbers_and_defaults_are_shown_as_they_are_typed(program, command, line):
    assert line in " ".join(help_of(program, command).split())
