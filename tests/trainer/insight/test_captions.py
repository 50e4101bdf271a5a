"""Captions of held-out samples during a run: they are those of `generate`, and change no bit of the run."""

import json
import os
import signal
from collections.abc import Callable

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cache_store.errors import Interrupted
from tests.trainer.conftest import MakeConfig
from tests.trainer.runs import assert_same_run, make_loop, metrics, open_alone, train_alone
from trainer.cli import main
from trainer.config import TrainConfig
from trainer.insight.captioner import make_captioner
from trainer.run.figures import Answered

pytestmark = pytest.mark.usefixtures("threads_as_in_a_child")


@pytest.fixture(scope="module")
def silent(configured_here: MakeConfig) -> TrainConfig:
    return train_alone(configured_here("silent", eval_batch_size=2))


@pytest.fixture(scope="module")
def captioned(configured_here: MakeConfig) -> TrainConfig:
    return train_alone(configured_here("captioned", sample_captions=3, eval_batch_size=2))


def test_captions_change_no_bit_of_a_run(silent, captioned):
    assert_same_run(captioned, silent)


def test_captions_are_the_answers_of_generate_to_the_same_rows(captioned, tmp_path):
    by_step = metrics(captioned.run.folder, "captions")
    assert list(by_step) == [5, 10, 12]
    rows = [[caption["row"] for caption in captions] for captions in by_step.values()]
    assert rows[0] == rows[1] == rows[2]
    options = [f"--rows={','.join(map(str, rows[0]))}", f"--report={tmp_path}/answers.json", "--batch_size=1"]
    assert main(["generate", str(captioned.run.folder), *options, "--max_tokens=60"]) == 0
    answers = json.loads((tmp_path / "answers.json").read_text())["answers"]
    for caption, answer in zip(by_step[12], answers, strict=True):
        assert answer["held_out"]
        assert answer["answer"].startswith(caption["answer"])
        assert caption["answer"]
        assert all(caption[key] == answer[key] for key in ("id", "prompt", "reference"))


@pytest.mark.slow
def test_a_run_stopped_while_it_captions_resumes_to_the_same(configured_here, captioned, capsys):
    config = configured_here("stopped", sample_captions=3, eval_batch_size=2)
    session = open_alone(config)
    captioner = make_captioner(session)

    def be_stopped(stopped: Callable[[], bool]) -> list[Answered]:
        os.kill(os.getpid(), signal.SIGTERM)
        return captioner(stopped)

    with pytest.raises(Interrupted):
        make_loop(session, be_stopped).run()
    assert metrics(config.run.folder, "captions") == {}
    assert_same_run(train_alone(config), captioned)
    assert metrics(config.run.folder, "captions") == metrics(captioned.run.folder, "captions")
    first = metrics(config.run.folder, "captions")[5][0]
    assert f"row {first['row']}, {first['id']}\n  answer" in capsys.readouterr().out


def test_tensorboard_shows_each_caption_beside_its_preview(captioned):
    events = EventAccumulator(str(captioned.run.folder / "tensorboard"))
    events.Reload()
    for captions in zip(*metrics(captioned.run.folder, "captions").values(), strict=True):
        tag = f"captions/{captions[0]['id']}"
        shown = events.Tensors(f"{tag}/text_summary")
        texts = [event.tensor_proto.string_val[0].decode() for event in shown]
        assert [event.step for event in shown] == [5, 10, 12]
        for text, caption in zip(texts, captions, strict=True):
            assert caption["answer"] in text
            assert f"reference\n\n    {caption['reference']}" in text
        assert {(image.width, image.height) for image in events.Images(f"{tag}/preview")} == {(150, 225)}


def test_a_model_that_cannot_generate_is_reported_and_trained(configured, capsys):
    session = open_alone(configured(sample_captions=2))
    session.whole.forward = None
    captioner = make_captioner(session)
    assert captioner(lambda: False) == []
    assert "no captions: the language model, Gemma3ForCausalLM" in capsys.readouterr().out
