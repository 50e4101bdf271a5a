"""`trainer generate`: the images that it asks about, their questions, and its refusals."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.make_cache import make_cache
from tests.trainer.answers import filled, reported
from tests.trainer.conftest import MEAN, STD, MakeConfig, describe, described_cache, save_language_model
from tests.trainer.runs import train_alone
from trainer.cli import main
from trainer.config import TrainConfig
from trainer.model.projector_file import PROJECTOR_FILE
from trainer.run.folder import checkpoints_of
from trainer.text.chat import to_messages


@pytest.fixture(scope="module")
def trained(configured_here: MakeConfig) -> TrainConfig:
    return train_alone(configured_here("trained", max_steps=2, save_every=1))


@pytest.fixture
def answers(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    return lambda place, *options: reported(place, tmp_path / "report.json", *options)


def test_rows_are_asked_their_own_questions_or_the_users(trained, answers, capsys):
    """Rows or ids, run, checkpoint or file with a cache, batches of any size: the answers are the same."""
    options = "--rows=8,0,38,8", "--max_tokens=6"
    said = answers(trained.run.folder, *options)
    printed = capsys.readouterr().out
    assert [each["row"] for each in said] == [8, 0, 38, 8]
    assert said[0] == said[3] != said[1]
    for each in said:
        question, reference, *_ = (message["content"] for message in to_messages(describe(each["row"])))
        assert (each["id"], each["prompt"], each["reference"]) == (f"sample-{each['row']:06d}", question, reference)
        held_out, cut = ", held out of training" * each["held_out"], " […]" * (not each["is_whole"])
        lines = [f"row {each['row']}, {each['id']}{held_out}", f"  prompt     {question}"]
        lines += [f"  answer     {each['answer']}{cut}", f"  reference  {reference}\n"]
        assert "\n".join(lines) in printed
    ids = "--ids=sample-000008,sample-000000,sample-000038,sample-000008", "--max_tokens=6", "--batch_size=1"
    places = [trained.run.folder, checkpoints_of(trained.run).path(2)]
    assert [answers(place, *ids) for place in places] == [said, said]
    file = trained.run.folder / PROJECTOR_FILE
    assert answers(file, *options, "--prompt=is it red", f"--cache={trained.cache}") != said
    asked = answers(file, *options, "--prompt=what is this", f"--cache={trained.cache}")
    assert [each["answer"] for each in asked[:2]] == [each["answer"] for each in said[:2]]
    assert not any("reference" in each for each in asked)


def make_latents() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((12, 4, 3, 2), np.float32)


REFUSED = [
    (2, [], "give exactly one of --rows 7,3, --ids ID,ID and --image FILE"),
    (2, ["--rows=1", "--image=a"], "give exactly one of --rows 7,3, --ids ID,ID and --image FILE"),
    (2, ["--rows=1,b"], "rows must be whole numbers separated by commas, such as 7,3; got 'b'"),
    (2, ["--rows=40"], "rows: the cache has rows [0, 40), and no row 40"),
    (2, ["--rows=2,17"], "row 17 of CACHE was rejected (missing: no such file), so the cache holds no sample of it"),
    (2, ["--ids=sample-000017"], "row 17 of CACHE was rejected (missing: no such file), so the cache holds no"),
    (2, ["--ids=sample-000001,x,y"], "ids: CACHE has no sample 'x', 'y'"),
    (2, ["--rows=1", "--cache=HOME/none"], "HOME/none holds no cache; make one with `precompute build`"),
    (2, ["--rows=1", "--temperature=-1"], "temperature must be in [0, 100], got -1"),
    (2, ["--rows=1", "--top_p=0"], "top_p must be above 0 and at most 1, got 0"),
    (2, ["--rows=1", "--max_tokens=0"], "max_tokens must be in [1, 1,048,576], got 0"),
    (2, ["--rows=1", "--max_tokens=250"], "knows 256 positions: set --max_tokens lower"),
    (2, ["--rows=1", "--language_model=HOME/none"], "model.language_model: no folder HOME/none"),
    (2, ["--rows=1", "--report=CACHE/seal.json"], "report: CACHE/seal.json lies in the cache CACHE"),
    (2, ["--rows=1", "--report=s3://bucket/it"], "report: s3://bucket/it is a URL; name a path on this machine"),
    (2, ["--image=a.png"], "--image needs a question: give one with --prompt"),
    (2, ["--image=a.png", "--prompt=a"], "image: there is no file a.png"),
    (2, ["--image=a.png", "--prompt=a", "--cache=c"], "--cache is for --rows and --ids; leave it out with --image"),
    (2, ["--rows=1", "--encoder=c"], "--encoder is for --image; rows are encoded already"),
    (2, ["--rows=1", "--cache=a", "--caches={world: a}"], "--cache is for one tower, --caches for several"),
    (2, ["--rows=1", "--caches={worl: a}"], "caches: the projector has no tower worl; did you mean world?"),
    (1, ["--rows=1", "--prompt=<end_of_turn>"], "which this tokenizer can only encode as a special token"),
]


@pytest.mark.parametrize(("code", "options", "message"), REFUSED)
def test_a_request_that_cannot_be_met_is_one_message(trained, tmp_path, capsys, code, options, message):
    *options, message = filled([*options, message], CACHE=trained.cache, HOME=tmp_path)
    assert main(["generate", str(trained.run.folder), *options]) == code
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "`trainer generate --help`" not in line]
    assert line.startswith("trainer: error: ")
    assert message in line


def refused(capsys: Any, code: int, *arguments: object) -> str:
    assert main(["generate", *map(str, arguments)]) == code
    error: str = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_another_model_cache_or_run_is_refused_unless_its_samples_mean_the_same(trained, answers, tmp_path, capsys):
    run, ask = trained.run.folder, "--rows=1"
    other = save_language_model(tmp_path / "other", rms_norm_eps=1e-5)
    error = refused(capsys, 1, run, ask, f"--language_model={other}")
    assert f"the projector was not trained for {other}\n" in error
    assert f"it was trained for {trained.model.language_model}; name that model, unchanged since then, with" in error
    alike = described_cache(tmp_path / "alike", 12, latents=make_latents(), latents_mean=MEAN, latents_std=STD)
    assert [each["row"] for each in answers(run, "--rows=1,2", f"--cache={alike}")] == [1, 2]
    rescaled = described_cache(tmp_path / "rescaled", 12, latents=make_latents(), latents_std=[1.0, 2.0, 3.0, 4.0])
    error = refused(capsys, 1, run, ask, f"--cache={rescaled}")
    assert f"{rescaled} is not what the projector of the tower world reads\n" in error
    assert "encoder.latents_std" in error
    assert "image.height" not in error
    larger = make_cache(tmp_path / "larger", make_latents().repeat(2, 2), latents_mean=MEAN, latents_std=STD)
    assert "image.height" in refused(capsys, 1, run, ask, f"--cache={larger}")
    assert "is not a run's folder and not a projector file" in refused(capsys, 2, tmp_path / "none", ask)
    alone = shutil.copy(run / PROJECTOR_FILE, tmp_path)
    assert "not in a run's folder, so its cache is not known; name one with --cache" in refused(capsys, 2, alone, ask)


def test_a_model_or_cache_that_has_moved_is_asked_for(configured, tmp_path, capsys):
    cache, model = described_cache(tmp_path / "cache", 16), save_language_model(tmp_path / "lm")
    config = train_alone(configured(cache=cache, language_model=model, max_steps=1))
    model.rename(tmp_path / "moved")
    error = refused(capsys, 2, config.run.folder, "--rows=1")
    assert f"the language model in {model}, which is no longer there; name its new place with --language_model" in error
    cache.rename(tmp_path / "moved cache")
    error = refused(capsys, 2, config.run.folder, "--rows=1", f"--language_model={tmp_path}/moved")
    assert f"{cache} holds no cache; " in error
    assert "this is the run's own cache; if it has moved, name it with --cache" in error
    options = f"--cache={tmp_path}/moved cache", f"--language_model={tmp_path}/moved"
    assert main(["generate", str(config.run.folder), "--rows=1", *options]) == 0
