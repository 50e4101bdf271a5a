"""The loop of diffusion models, killed and resumed, prints the losses of a run that was not stopped."""

from pathlib import Path

import numpy as np
import pytest

from cache_store.format.array import SizeRule
from tests.examples.test_examples import Steps, end, kill_at, run, start, steps_in
from tests.make_cache import make_cache, text_recipe

STEPS = 30
TEXTS = {
    "FLUX.1": {"t5": (7, 16), "pooled": (12,)},
    "Qwen-Image": {"qwen": (7, 16)},
    "SDXL": {"clip": (7, 8), "clip-2": (7, 12), "pooled": (12,)},
}
"""Texts of each family, by the names that the script gives them: shape of a sample."""

pytestmark = pytest.mark.usefixtures("threads_as_in_a_child")


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of latents of two sizes, and one for each text."""
    folder, random = tmp_path_factory.mktemp("diffusion"), np.random.default_rng(0)
    sizes = [random.standard_normal((count, 4, *cells), np.float32) for count, cells in ((13, (8, 6)), (9, (4, 12)))]
    rule = SizeRule(preset="ours", resolution=64, min=32, max=128, step=16)
    make_cache(folder / "latents", sizes, image={"rule": rule})
    for texts in TEXTS.values():
        for name, shape in texts.items():
            make_cache(folder / name, random.standard_normal((22, *shape), np.float32), text=text_recipe(7))
    return folder


def options(family: str, caches: Path, out: Path, *more: object) -> list[object]:
    texts = [f"--text={name}={caches / name}" for name in TEXTS[family]]
    return [family, out, "--latents", caches / "latents", *texts, *more]


@pytest.fixture(scope="module", params=TEXTS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def uninterrupted(family: str, caches: Path, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    out = tmp_path_factory.mktemp("uninterrupted") / "out"
    return steps_in(run("diffusers_lora", *options(family, caches, out, "--steps", STEPS)))


def test_a_run_that_was_stopped_twice_trains_as_one_that_was_not(family, caches, uninterrupted, tmp_path):
    assert sorted(uninterrupted) == [*range(1, STEPS + 1)]
    assert uninterrupted[1][0] != uninterrupted[STEPS][0]
    found = Steps()
    for steps in (8, 17, STEPS):
        found |= steps_in(
            run("diffusers_lora", *options(family, caches, tmp_path / "out", "--steps", steps, "--resume"))
        )
    assert found == uninterrupted


def test_a_folder_that_exists_is_refused(caches, tmp_path, capsys):
    with pytest.raises(SystemExit, match="1"):
        run("diffusers_lora", *options("FLUX.1", caches, tmp_path))
    assert capsys.readouterr().err == f"diffusers_lora.py: error: {tmp_path} exists; add --resume to continue it\n"


def test_a_killed_run_goes_on_from_its_last_checkpoint(family, caches, uninterrupted, tmp_path):
    if family != "FLUX.1":
        pytest.skip("one family is killed")
    command = options(family, caches, tmp_path / "out", "--steps", STEPS)
    kill_at(27, start("diffusers_lora", 1, *command))
    resumed = steps_in(end(start("diffusers_lora", 1, *command, "--resume")))
    assert sorted(resumed) == [*range(26, STEPS + 1)]
    assert resumed == {step: uninterrupted[step] for step in resumed}
