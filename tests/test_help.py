"""`--help` of every command of all three programs speaks of the command line, and fits the terminal."""

from collections.abc import Callable

import pytest

from cache_store import cli as cache_store
from precompute import cli as precompute
from trainer import cli as trainer

PROGRAMS = {"cache-store": cache_store, "precompute": precompute, "trainer": trainer}

COMMANDS = [(name, command) for name, program in PROGRAMS.items() for command in ("", *program.COMMANDS)]

Help = Callable[[str, str, int], str]


@pytest.fixture
def help_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Help:
    def show(program: str, command: str, columns: int) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as ended:
            PROGRAMS[program].main([*command.split(), "--help"])
        assert ended.value.code == 0
        return capsys.readouterr().out

    return show


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_without_a_command_lists_them(program, capsys):
    assert PROGRAMS[program].main([]) == 2
    first, *lines, last = capsys.readouterr().err.splitlines()
    assert first == f"{program}: error: no command was given; usage: {program} COMMAND [options]"
    assert {line.split()[0] for line in lines} == {*PROGRAMS[program].COMMANDS}
    assert last == f"{program}: run `{program} COMMAND --help` for its options"


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(("program", "command"), COMMANDS)
def test_no_python_type_and_no_line_too_long(help_of, program, command, columns):
    text = help_of(program, command, columns)
    for word in ("Literal[", "Optional[", "Union[", "<class", "type:", "NoneType", " None", "True", "False", "list["):
        assert word not in text
    assert max(map(len, text.splitlines())) <= columns


@pytest.mark.parametrize(("program", "command"), COMMANDS)
def test_nothing_is_said_twice(help_of, program, command):
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
def test_the_usage_line_says_what_has_to_be_typed(help_of, program, command, usage):
    assert help_of(program, command, 80).startswith(f"usage: {usage}\n\n")


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
def test_choices_numbers_and_defaults_are_shown_as_they_are_typed(help_of, program, command, line):
    assert line in " ".join(help_of(program, command, 80).split())
