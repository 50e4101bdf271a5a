"""One place to import from, without torch where none is needed; other projects' packages of our names are told."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import cache_store
import encode_once
import trainer
from cache_store.errors import ConfigError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/cache_store/format/golden_images"


def python(code: str, *places: Path, script: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code, or a script, with packages from these places."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    command = [sys.executable, *([str(script)] if script else ["-P", "-c", code])]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)


def test_every_public_name_of_the_programs_is_one_of_encode_once():
    theirs = {name: package for package in (cache_store, trainer) for name in package.__all__}
    for name, package in theirs.items():
        assert getattr(encode_once, name) is getattr(package, name)
    assert {*encode_once.__all__} == {*theirs, "encode_images"} == {*encode_once.HOMES, "__version__"}
    assert encode_once.encode_images.__module__ == "precompute.encode_images"


CACHE = encode_once.open_cache(GOLDEN)
JOINED, LATENTS, BY = encode_once.open_joined({"one": CACHE}), CACHE.read([0]), CACHE.spec.array.encoder
IDS = {"width": [1], "height": [1], "crop_left": [0], "crop_top": [0]}
MISUSED: dict[str, Callable[[], object]] = {
    "the folder": lambda: encode_once.open_cache(5),
    "the URL": lambda: encode_once.open_joined({"one": None}),
    "out": lambda: CACHE.read([0], [1.0]),
    "columns are row, id,": lambda: CACHE.samples([0], ["nope"]),
    "got 5; columns": lambda: JOINED.samples([0], 5),
    "score > 5": lambda: CACHE.where(5),
    "seed": lambda: CACHE.captions([0], seed="a"),
    "array": lambda: encode_once.normalize([1.0], BY),
    "channel_axis": lambda: encode_once.denormalize(LATENTS, BY, 1),
    "width, height, crop_left": lambda: encode_once.time_ids({"width": [1]}, (8, 8)),
    "(height, width)": lambda: encode_once.time_ids(IDS, 8),
    "open_cache": lambda: encode_once.encode_images(GOLDEN, []),
}


def test_a_wrong_type_or_name_is_one_line_that_tells_what_there_is():
    for named, call in MISUSED.items():
        with pytest.raises((ConfigError, ValueError)) as caught:
            call()
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_cache_is_read_without_torch():
    read = f"import encode_once, sys; encode_once.open_cache({str(GOLDEN)!r}).read([0]); "
    done = python(f"{read} sys.exit(bool({{'torch', 'trainer', 'precompute'}} & {{*sys.modules}}))", ROOT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("name", "extra"), [("LatentStream", "trainer"), ("encode_images", "precompute")])
def test_a_name_that_needs_torch_names_its_extra(name, extra):
    done = python(f"import sys; sys.modules['torch'] = None; from encode_once import {name}", ROOT)
    assert done.stderr.splitlines()[-1].endswith(f"; run `pip install 'encode-once[{extra}]'`")


STREAM = "from encode_once import LatentStream"
CONSOLE = "import sys; from encode_once.console import trainer; sys.argv[1:] = ['--help']; sys.exit(trainer())"


def another(folder: Path, name: str) -> Path:
    """Write another project's package, which must never run."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "__init__.py").write_text("raise SystemExit('this is another project')")
    return folder / name / "__init__.py"


@pytest.mark.parametrize(("code", "over"), [(STREAM, False), (CONSOLE, False), (CONSOLE, True)])
def test_another_trainer_is_named(tmp_path, code, over):
    """One that comes first, or that pip has put over ours."""
    for package in ("encode_once", "cache_store", "trainer") if over else ():
        shutil.copytree(ROOT / package, tmp_path / package)
    found = another(tmp_path, "trainer")
    done = python(code, tmp_path, *([] if over else [ROOT]))
    *traceback, error = done.stderr.splitlines()
    assert f"`trainer` is another project's, not encode-once's: {found};" in error
    assert (done.returncode, bool(traceback)) == ((1, True) if code is STREAM else (2, False))


def test_a_script_called_trainer_is_named_and_does_not_run_twice(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(f"print('runs')\n{STREAM}\n")
    done = python("", ROOT, script=script)
    assert (done.stdout, done.stderr.count(f"not encode-once's: {script};")) == ("runs\n", 1)
