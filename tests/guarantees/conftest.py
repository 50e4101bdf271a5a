"""Every test here runs for each place where a cache may be; a new place is a line in `caches`."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from cache_store.format.schema import StoreFormat
from precompute.cli import main
from tests.command_runs import make_scene, quick_loading, run
from tests.guarantees.kinds import KINDS, MODELS, Media, Sealed
from tests.guarantees.programs import Program, die_at
from tests.object_stores.faults import Proxy
from tests.places import Folder, Objects, Place
from tests.precompute.conftest import Project, built, built_once, foreign, vae_path, write_source

__all__ = ["built", "built_once", "foreign", "quick_loading", "run", "vae_path"]  # fixtures


@pytest.fixture(params=["folder", "bucket"])
def caches(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """The place of the caches; its name needs quotes in a shell."""
    if request.param == "folder":
        return Folder(tmp_path / "my caches")
    url, server = request.getfixturevalue("bucket"), request.getfixturevalue("server")
    return Objects(f"{url}/my caches", server.endpoint)


Start = Callable[..., Program]


@pytest.fixture
def start(tmp_path: Path, caches: Place) -> Start:
    """Starts a command line in its own process, whose environment gives access to `caches`."""
    return lambda *line, **options: Program([str(word) for word in line], tmp_path, **options)


@pytest.fixture
def dying(caches: Place, start: Start, request: pytest.FixtureRequest) -> Start:
    """Starts a command line and kills its process at the `at`-th step of writing, from 1.

    In a folder, a step is a sync: of a file before it gets its name, or of a folder after a name changed. In a bucket,
    it is a request that writes or deletes: before the server gets it, or after the server is done.
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
    return cache(lambda form: make_scene(tmp_path_factory.mktemp(form), vae_path, form))


@pytest.fixture
def project(tmp_path: Path, vae_path: Path, capsys: pytest.CaptureFixture[str], caches: Place) -> Project:
    write_source(tmp_path / "source")
    return Project(tmp_path, vae_path, capsys, caches)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Sealed]:
    """Begins a project of a kind in a folder; sources and models are shared."""

    @cache
    def files_of(media: Media) -> Path:
        media.write(folder := tmp_path_factory.mktemp("files"))
        return folder

    model_of = cache(lambda name: MODELS[name](tmp_path_factory.mktemp("model")))
    return lambda folder, capsys, name: Sealed(folder, capsys, name, files_of(KINDS[name].media), model_of)


@pytest.fixture(scope="session")
def sealed_once(begun: Callable[..., Sealed], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Folder]:

    @cache
    def build(name: str) -> Folder:
        project = begun(tmp_path_factory.mktemp("sealed"), None, name)
        assert main(["build", "--config", str(project.config())]) == 0
        return Folder(project.cache)

    return build


@pytest.fixture
def sealed(
    kind: str,
    begun: Callable[..., Sealed],
    sealed_once: Callable[[str], Folder],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Sealed:
    project = begun(tmp_path, capsys, kind)
    project.place.mirror(sealed_once(kind))
    return project
