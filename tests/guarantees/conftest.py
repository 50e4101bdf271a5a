"""Every test here runs once for each place where a cache may lie; a new place is a line in `caches`."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

import precompute.rerun.steps as build_module
from cache_store.format.schema import StoreFormat
from precompute.encoders.registry import load_encoder
from tests.command_runs import PROGRAMS, make_scene
from tests.guarantees.programs import Program, die_at
from tests.object_stores.faults import Proxy
from tests.places import Folder, Place
from tests.precompute.acts import make_foreign
from tests.precompute.conftest import Project, built, built_once, vae_path, write_source

__all__ = ["built", "built_once", "vae_path"]  # fixtures


@pytest.fixture(params=["folder", "bucket"])
def caches(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where caches lie, under names that a shell wants in quotes."""
    if request.param == "folder":
        return Folder(tmp_path / "my caches")
    url, server = request.getfixturevalue("bucket"), request.getfixturevalue("server")
    from tests.object_stores.objects import Objects  # which needs obstore

    return Objects(f"{url}/my caches", server.endpoint)


load_once = cache(load_encoder)


@pytest.fixture(autouse=True)
def quick_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "load_encoder", load_once)


Start = Callable[..., Program]


@pytest.fixture
def start(tmp_path: Path, caches: Place) -> Start:
    """Begins a command line in a process of its own, which the environment tells where `caches` are."""
    return lambda *line, **options: Program([str(word) for word in line], tmp_path, **options)


@pytest.fixture
def dying(caches: Place, start: Start, request: pytest.FixtureRequest) -> Start:
    """Begins a command line whose process is killed at a step of its writing: `at`, from 1.

    In a folder, at a sync: of a file that has not got its name yet, or of a folder whose names have just changed. In a
    bucket, at a request that writes or deletes: before the server is asked, or once it has done it.
    """

    def at_a_sync(*line: str, at: int) -> Program:
        deadly = (word.replace(caches.address, f"deadly://{caches.address}") for word in line)
        return start(*deadly, prepare=partial(die_at, at))

    def at_a_request(*line: str, at: int) -> Program:
        proxy: Proxy = request.getfixturevalue("proxy")
        proxy.mend()
        fault = proxy.fail("reset" if at % 2 else "lost", "PUT|POST|DELETE", first=(at + 1) // 2)
        program = start(*line)
        fault.also = program.kill
        return program

    return at_a_sync if isinstance(caches, Folder) else at_a_request


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory, vae_path: Path) -> Callable[[StoreFormat], Path]:
    """Configs of small builds, and caches in a folder, in either form."""
    return cache(lambda form: make_scene(tmp_path_factory.mktemp(form), vae_path, form))


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory, vae_path: Path) -> Path:
    return make_foreign(tmp_path_factory.mktemp("foreign"), vae_path)


@pytest.fixture
def project(tmp_path: Path, vae_path: Path, capsys: pytest.CaptureFixture[str], caches: Place) -> Project:
    write_source(tmp_path / "source")
    return Project(tmp_path, vae_path, capsys, caches)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a program says to a command line, which ends with a code and without a traceback."""

    def said(program: str, *arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        ended = PROGRAMS[program]([*arguments])
        text = "".join(capsys.readouterr())
        assert ended == code, text
        assert "Traceback" not in text
        return text

    return said
