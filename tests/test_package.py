"""What `pip install encode-once` brings: wheel and sdist, built as a release builds them, and their metadata."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from cache_store import __version__

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PACKAGES = ("cache_store", "encode_once", "precompute", "trainer")
FOLDERS = (*PACKAGES, ".github", "benchmarks", "configs", "demo", "deploy", "docs", "examples", "tests")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.so")
EXTRA = re.compile(r"(?:encode-once|'\.)\[([^]]+)\]|\binstall\(['\"]([^'\"]+)['\"]\)")
"""An extra in a `pip install`, and in the function that writes such a command into a message."""


def run_build(code: str, folder: Path, **environment: str) -> None:
    """Call setuptools as pip does, with the setuptools that is installed; no network."""
    code = f"import os, sys; os.chdir(sys.argv[1]); from setuptools import build_meta; build_meta.{code}"
    done = subprocess.run(
        [sys.executable, "-c", code, folder], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that a clone has; building writes beside them."""
    tree = tmp_path_factory.mktemp("package") / "tree"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=LEFT_OUT)
    for path in (path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")):
        shutil.copy(path, tree)
    return tree


@pytest.fixture(scope="module")
def unpacked(tree: Path) -> Path:
    """The sdist, unpacked."""
    run_build("build_sdist('../sdist')", tree)
    with tarfile.open(tree.parent / f"sdist/encode_once-{__version__}.tar.gz") as sdist:
        sdist.extractall(tree.parent, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return tree.parent / f"encode_once-{__version__}"


@pytest.fixture(scope="module")
def wheel(unpacked: Path) -> Iterator[zipfile.ZipFile]:
    """The wheel, built from the sdist."""
    run_build("build_wheel('../wheel')", unpacked)
    with zipfile.ZipFile(*(unpacked.parent / "wheel").iterdir()) as wheel:
        yield wheel


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(wheel.read(f"encode_once-{__version__}.dist-info/METADATA").decode())


def url_of(metadata: Message, name: str) -> str:
    return dict(each.split(", ") for each in metadata.get_all("Project-URL", []))[name]


def files_in(folder: Path, *names: str) -> set[str]:
    return {str(path.relative_to(folder)) for name in names for path in (folder / name).rglob("*") if path.is_file()}


def test_the_sdist_holds_every_file_of_the_repository(tree, unpacked):
    assert files_in(tree, *FOLDERS) <= files_in(unpacked, ".")
    assert {path.name for path in tree.iterdir()} <= {path.name for path in unpacked.iterdir()}


def test_the_wheel_holds_the_packages_alone(tree, wheel):
    extensions = {"cache_store/cache/_gather.abi3.so"}
    installed = {name for name in wheel.namelist() if not name.startswith(f"encode_once-{__version__}.dist-info/")}
    assert installed - extensions == {name for name in files_in(tree, *PACKAGES) if not name.endswith(".c")}
    assert re.search(r"-cp311-abi3-\w+\.whl$", str(wheel.filename))


def test_links_of_the_description_work_without_the_files_beside_it(metadata):
    home = url_of(metadata, "Homepage")
    text = str(metadata.get_payload())
    targets = re.findall(r"\]\(([^)]+)\)", text)
    kind = r"(raw(?=/.*\.png)|blob(?!/.*\.png))"
    assert [each for each in targets if not re.match(rf"#|{re.escape(home)}/{kind}/v{__version__}/", each)] == []
    paths = [re.sub(rf"{re.escape(home)}/\w+/v[^/]*/", "", each) for each in targets]
    assert paths == re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())


def test_every_extra_that_is_named_anywhere_exists(metadata):
    documents = [*ROOT.glob("*.md"), *ROOT.glob("setup.cfg"), *(path for name in FOLDERS for path in rglob(name))]
    named = {
        extra.strip()
        for path in documents
        for group in EXTRA.findall(path.read_text())
        for extra in ",".join(group).split(",")
        if extra.strip()
    }
    assert {"precompute", "trainer", "object-stores", "hub", "ray"} <= named
    assert named <= {*metadata.get_all("Provides-Extra", [])}


def rglob(folder: str) -> list[Path]:
    """List the text files of a folder that may tell a user to install something; tests name absent extras."""
    kinds = (".py", ".md", ".yaml", ".sbatch")
    return [path for path in (ROOT / folder).rglob("*") if path.suffix in kinds and folder != "tests"]
