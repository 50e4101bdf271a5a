"""What the documents name exists (tests, files, headings, commands, options), and the loops they show run."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.make_cache import make_cache
from tests.test_help import PROGRAMS, help_of

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def anchors(document: Path) -> set[str]:
    """Of its headings, as web sites of repositories make them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def shown_commands(document: Path) -> list[tuple[str, str, str]]:
    """Program, command and the rest of each command line in its blocks of code."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
    blocks = "\n".join(text for language, text in fences if not language)
    joined = re.sub(r" \\\n\s+", " ", blocks)
    start = rf"^(?:\$ )?(?:torchrun .*-m |python -m )?({'|'.join(PROGRAMS)}|cache_store) (\w+)(.*)$"
    return [(program.replace("_", "-"), *rest) for program, *rest in re.findall(start, joined, re.MULTILINE)]


@each_document
def test_a_test_that_a_document_names_exists(document):
    for name in re.findall(r"`(test_\w+)`", document.read_text()):
        assert f"def {name}(" in TESTS, name


@each_document
def test_a_link_leads_to_a_file_and_its_heading(document):
    for link in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        path, _, heading = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        assert not heading or heading in anchors(target), link


@each_document
def test_a_path_of_the_code_that_a_document_names_exists(document):
    rooms = "cache_store|precompute|trainer|tests|docs|configs|benchmarks"
    for path in re.findall(rf"`((?:{rooms})/[\w./]*)`", document.read_text()):
        assert (ROOT / path).exists(), path


@each_document
def test_a_command_line_in_a_document_has_options_that_exist(document):
    for program, command, options in shown_commands(document):
        known = help_of(program, command)
        for option in re.findall(r" (--?[a-z][\w.-]*)", options.partition(" # ")[0]):
            assert re.search(rf"{option}[ ,\n]", known), f"{program} {command} {option}"


def test_the_readme_shows_commands_of_every_program():
    assert {program for program, *_ in shown_commands(ROOT / "README.md")} == {*PROGRAMS}


def test_the_tree_in_the_readme_holds_every_room():
    readme = (ROOT / "README.md").read_text()
    for package in ("cache_store", "precompute", "trainer"):
        tree = readme.partition(f"\n{package}/ ")[2].partition("\n```")[0]
        shown = re.findall(r"^  (\w+)/ ", re.split(r"^\w", tree, maxsplit=1, flags=re.MULTILINE)[0], re.MULTILINE)
        assert sorted(shown) == sorted(path.parent.name for path in (ROOT / package).glob("*/__init__.py"))


@pytest.fixture(scope="module")
def small_cache(tmp_path_factory):
    latents = np.random.default_rng(0).standard_normal((20, 16, 4, 4), np.float32)
    return make_cache(tmp_path_factory.mktemp("documents") / "cache", latents, rejected=[2])


def loops(document: Path) -> list[str]:
    """Its blocks of Python that open a cache."""
    blocks = re.findall(r"^```python\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
    return [block for block in blocks if re.search(r"open_|LatentStream", block)]


@pytest.mark.parametrize("name", ["README.md", "docs/operations.md", "docs/training.md"])
def test_the_loops_in_the_documents_run(name, small_cache):
    shown = loops(ROOT / name)
    assert shown
    for code in shown:
        exec(re.sub(r'"[\w/.-]*cache"', repr(str(small_cache)), code), {})
