"""Documents, `--help` of all three programs, and configs with their comments agree with the code."""

import importlib
import importlib.metadata
import inspect
import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import encode_once
from cache_store import __version__
from cache_store import cli as cache_store
from precompute import cli as precompute
from tests.make_cache import make_cache, text_recipe
from trainer import cli as trainer

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/results/*.md")])
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
PROGRAMS = {"cache-store": cache_store, "precompute": precompute, "trainer": trainer}
ROOMS = "cache_store|encode_once|precompute|trainer|tests|docs|configs|deploy|benchmarks|examples"
PYTHON_WORDS = ("Literal[", "Optional[", "Union[", "<class", "type:", "NoneType", " None", "True", "False", "list[")


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
    assert first.startswith(f"{program}: error: ")
    assert {line.split()[0] for line in lines} == {*PROGRAMS[program].COMMANDS}
    assert f"`{program} COMMAND --help`" in last


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_says_its_version(program, capsys):
    with pytest.raises(SystemExit) as ended:
        PROGRAMS[program].main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"{program} {__version__}\n")
    assert importlib.metadata.version("encode-once") == __version__
    assert importlib.import_module(program.replace("-", "_")).__version__ == __version__


def test_each_public_name_has_a_docstring():
    for name in set(encode_once.__all__) - {"__version__"}:
        found = getattr(encode_once, name)
        assert found.__doc__, name
        public = {} if not inspect.isclass(found) else vars(found)
        for member, value in public.items():
            if not member.startswith("_") and callable(getattr(value, "fget", value)):
                assert inspect.getdoc(getattr(found, member)), f"{name}.{member}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_command_that_is_not_there_is_named_with_those_that_are(program, capsys):
    commands = [*PROGRAMS[program].COMMANDS]
    for typed, named in ((commands[0][:-1], commands[0]), ("xyz", ", ".join(commands))):
        assert PROGRAMS[program].main([typed, "--cache", "x"]) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert error.startswith(f"{program}: error: ")
        assert typed in error.removesuffix(named)
        assert named in error


@pytest.mark.parametrize(
    ("program", "command"), [(name, command) for name in PROGRAMS for command in ("", *PROGRAMS[name].COMMANDS)]
)
def test_help_fits_the_terminal_without_python_types_or_repeats(program, command):
    for columns in (80, 120):
        text = help_of(program, command, columns)
        assert not [word for word in PYTHON_WORDS if word in text]
        assert max(map(len, text.splitlines())) <= columns
    lines = [line.rstrip(".:") for line in help_of(program, command, 250).splitlines() if line]
    assert len(lines) == len(set(lines))


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as web sites of repositories make them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def shown_commands(document: Path) -> list[tuple[str, str, str]]:
    """List program, command and the rest of each command line in a document's code blocks."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
    blocks = "\n".join(text for language, text in fences if not language)
    joined = re.sub(r" \\\n\s+", " ", blocks)
    start = rf"^(?:\$ )?(?:torchrun .*-m |python -m )?({'|'.join(PROGRAMS)}|cache_store) (\w+)(.*)$"
    return [(program.replace("_", "-"), *rest) for program, *rest in re.findall(start, joined, re.MULTILINE)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_exists(document):
    text = document.read_text()
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in TESTS, name
    for path in re.findall(rf"`((?:{ROOMS})/[\w./]*)`", text):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, heading = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        assert not heading or heading in anchors(target), link
    for program, command, options in shown_commands(document):
        known = help_of(program, command)
        for option in re.findall(r" (--?[a-z][\w.-]*)", options.partition(" # ")[0]):
            assert re.search(rf"{option}[ ,\n]", known), f"{program} {command} {option}"


def test_the_readme_shows_every_program_and_every_room():
    assert {program for program, *_ in shown_commands(ROOT / "README.md")} == {*PROGRAMS}
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/architecture.md"))
    for package in ("cache_store", "precompute", "trainer"):
        rooms = sorted(path.parent.name for path in (ROOT / package).glob("*/__init__.py"))
        (line,) = re.findall(rf"^{package}/ .*: (.*)$", readme, re.MULTILINE)
        assert sorted(line.split(", ")) == rooms
        tree = re.split(r"^[\w`]", page.partition(f"\n{package}/\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
        assert sorted(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE)) == rooms


@pytest.mark.parametrize(
    "name", ["README.md", "docs/reference/encoders.md", "docs/guide/building.md", "docs/guide/training.md"]
)
def test_the_loops_in_the_documents_run(name, tmp_path):
    cache = make_cache(tmp_path / "cache", np.zeros((20, 16, 4, 4), np.float32), rejected=[2])
    recipe = text_recipe(6)
    texts = make_cache(tmp_path / "texts", np.zeros((20, 6, 8), np.float32), text=recipe)
    second = msgspec.structs.replace(recipe, caption=2)
    others = make_cache(tmp_path / "others", np.ones((20, 6, 8), np.float32), text=second)
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)
    loops = [block for block in blocks if re.search(r"open_|LatentStream", block)]
    assert loops
    for code in loops:
        code = re.sub(r'"[\w/.-]*t5-2"', repr(str(others)), code)
        code = re.sub(r'"[\w/.-]*t5"', repr(str(texts)), code)
        exec(re.sub(r'"[\w/.-]*cache"', repr(str(cache)), code), {})


def parsed(line: str) -> Any:
    """Parse the config of `PROGRAM COMMAND OPTIONS…`, at the root of the repository."""
    program, *options = shlex.split(line)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return PROGRAMS[program].PROGRAM.parse(options).config


def lines_in(config: Path) -> list[str]:
    """List the command lines in a config's comments, without launchers and trailing remarks."""
    comments = "\n".join(line for line in config.read_text().splitlines() if line.startswith("#"))
    joined = re.sub(r" \\\n#\s+", " ", comments)
    return re.findall(r"^#   (?:torchrun .* -m )?((?:precompute|trainer) .+?)(?:   .*)?$", joined, re.MULTILINE)


@pytest.mark.parametrize("config", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.name)
def test_a_config_and_each_command_line_in_its_comments_parse(config):
    is_build = not config.name.startswith("train_")
    whole = parsed(f"{'precompute build' if is_build else 'trainer train'} --config {config}")
    if is_build and not config.name.startswith("precompute_"):  # a second cache is read beside a first
        assert parsed(f"trainer train --config configs/train_{config.name}").cache == whole.cache
    lines = lines_in(config)
    assert lines
    for line in lines:
        assert f"configs/{config.name}" in line
        parsed(line)
