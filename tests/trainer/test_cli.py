import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.make_cache import make_cache
from tests.trainer.conftest import describe
from tests.trainer.runs import ROOT, command, make_config, metrics, start_process
from trainer.cli import main


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


def failure(capsys: pytest.CaptureFixture[str], code: int, arguments: list[str]) -> str:
    """What the user reads; the exit code must be `code`."""
    assert main(arguments) == code
    return capsys.readouterr().err


def test_train_then_eval_reports_own_and_shuffled_loss(
    cache_path: Path, language_model: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(cache_path, language_model, home / "run")
    assert main(command(config)) == 0
    assert "samples: 30 to train on, 7 held out" in capsys.readouterr().out
    report = home / "eval.json"
    assert main([*command(config, "eval"), f"--report={report}"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads(report.read_text())
    assert printed["step"] == 12
    assert printed["own"] == pytest.approx(metrics(home / "run", "val_loss")[12], rel=1e-5)
    assert printed["shuffled"] == pytest.approx(metrics(home / "run", "val_loss_shuffled")[12], rel=1e-5)
    assert main([*command(config, "eval"), f"--checkpoint={home}/run/checkpoints/step-00000005"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 5


def test_a_yaml_file_and_the_command_line_are_one_config(
    cache_path: Path, language_model: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = home / "train.yaml"
    file.write_text(
        f"cache: {cache_path}\nmodel: {{language_model: {language_model}, projector: linear}}\n"
        f"data: {{max_text_tokens: 64}}\nrun: {{output: {home}/yaml, precision: fp32}}\n"
    )
    assert main(["train", f"--config={file}", "--run.max_steps=2", "--data.val_fraction=0"]) == 0
    resolved = (home / "yaml" / "config.yaml").read_text()
    assert "max_steps: 2" in resolved
    assert "projector: linear" in resolved
    assert main(["train", f"--config={home}/yaml/config.yaml"]) == 0
    assert "going on after step 2 of 2" in capsys.readouterr().out


def test_a_batch_larger_than_the_samples_to_train_on_is_said(
    cache_path: Path, language_model: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(cache_path, language_model, home / "large")
    assert main([*command(config), "--data.batch_size=32", "--run.max_steps=1"]) == 0
    assert "data.batch_size 32 is more than that" in capsys.readouterr().out


def test_a_host_without_a_compiler_is_told_so_before_the_first_step(
    cache_path: Path, language_model: Path, home: Path
) -> None:
    config = make_config(cache_path, language_model, home / "uncompiled", compile=True)
    process = start_process(config, {"CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor")})
    _, error = process.communicate()
    assert process.returncode == 2
    assert "trainer: error: run.compile: torch.compile does not work here" in error
    assert "Traceback" not in error
    assert not (home / "uncompiled").exists()


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"batch_size": 9, "accumulate": 2}, 2, "data.batch_size 9 is the global batch and must divide"),
        ({"model_name": "./nothing"}, 1, "model.language_model: no folder ./nothing"),
        ({"max_text_tokens": 300}, 2, "300 make 308"),
        ({"max_text_tokens": 5}, 1, "has no text to learn: none of its 37 samples has an assistant's words"),
        ({"resume": "elsewhere"}, 2, "elsewhere is no checkpoint"),
        ({"chat_template": "none.jinja"}, 2, "model.chat_template cannot be read"),
    ],
)
def test_a_config_that_cannot_run_is_one_line(
    cache_path: Path, language_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any], code: int, message: str,
) -> None:  # fmt: skip
    model = changes.pop("model_name", language_model)
    error = failure(capsys, code, command(make_config(cache_path, model, tmp_path / "run", **changes)))
    assert message in error
    assert [line for line in error.splitlines() if line.startswith("trainer: ")] == [error.splitlines()[-1]]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--run.epochs=0", "run.epochs must be above 0"),
        ("--data.val_fraction=1.5", "data.val_fraction must be in [0, 1)"),
        ("--model.layout=diagonal", "model.layout"),
        ("--optim.momentum=1", "optim.momentum"),
        ("--optim.lr=fast", "optim.lr"),
    ],
)
def test_a_wrong_value_names_its_key(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    required = ["--cache=c", "--model.language_model=m", "--run.output=o"]
    error = failure(capsys, 2, ["train", *required, option])
    assert message in error
    assert "Traceback" not in error


def test_nothing_is_written_into_the_cache(
    cache_path: Path, language_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(cache_path.rglob("*"))
    inside = str(cache_path / "seal.json")
    within = make_config(cache_path, language_model, Path(inside))
    for config in (
        within,
        make_config(cache_path, language_model, tmp_path / "run", text_dir=str(cache_path / "text")),
    ):
        assert "lies in the cache" in failure(capsys, 2, command(config))
    config = make_config(cache_path, language_model, tmp_path / "run")
    assert f"report: {inside} lies in the cache" in failure(capsys, 2, [*command(config, "eval"), f"--report={inside}"])
    assert sorted(cache_path.rglob("*")) == before


def test_a_path_may_begin_at_home(
    cache_path: Path, language_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "lm").symlink_to(language_model)
    config = make_config(cache_path, Path("~/lm"), Path("~/run"), max_steps=1, text_dir="~/text")
    assert main(command(config)) == 0
    arguments = ["--checkpoint=~/run/checkpoints/step-00000001", "--report=~/eval.json"]
    assert main([*command(config, "eval"), *arguments]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.json", "lm", "run", "text"]


def test_evaluation_without_checkpoint_or_held_out_samples_is_refused(
    cache_path: Path, language_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(cache_path, language_model, tmp_path / "run", val_fraction=0.0, max_steps=1)
    assert "holds no checkpoint" in failure(capsys, 2, command(config, "eval"))
    assert main(command(config)) == 0
    assert "holds out 0 of 37 samples" in failure(capsys, 2, command(config, "eval"))


def test_a_run_of_another_seed_layout_or_batch_is_refused_with_what_differs(
    cache_path: Path, language_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(make_config(cache_path, language_model, tmp_path / "run", max_steps=1))) == 0
    changes = {"seed": 5, "layout": "channel", "batch_size": 4}
    other = make_config(cache_path, language_model, tmp_path / "run", max_steps=2, **changes)
    error = failure(capsys, 1, command(other))
    for line in ("data.seed", "model.layout", "data.batch_size"):
        assert line in error
    assert "model.projector" not in error


def test_a_run_whose_cache_was_extended_is_refused_and_says_what_to_do(
    language_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latents = np.random.default_rng(0).standard_normal((24, 4, 2, 2), np.float32)
    for rows in (16, 24):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        conversations = [describe(row) for row in range(rows)]
        cache = make_cache(tmp_path / "cache", latents[:rows], conversations=conversations)
        config = make_config(cache, language_model, tmp_path / "run", max_steps=1 + rows // 24)
        if rows == 16:
            assert main(command(config)) == 0
    error = failure(capsys, 1, command(config))
    assert "cache identity" in error
    assert "the cache was extended" in error
    assert "--run.output NEW" in error


def test_an_unsealed_or_damaged_cache_is_refused(
    language_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latents = np.random.default_rng(0).standard_normal((16, 4, 2, 2), np.float32)
    conversations = [describe(row) for row in range(16)]
    unsealed = make_cache(tmp_path / "unsealed", latents, conversations=conversations, seal=False)
    error = failure(capsys, 1, command(make_config(unsealed, language_model, tmp_path / "run")))
    assert "is not sealed" in error
    damaged = make_cache(tmp_path / "damaged", latents, conversations=conversations)
    shard = next((damaged / "latents" / "c").glob("1/0/0/0"))
    shard.write_bytes(shard.read_bytes()[:-1])
    error = failure(capsys, 1, command(make_config(damaged, language_model, tmp_path / "run")))
    assert "is damaged" in error
    assert "shard 1" in error
    error = failure(capsys, 1, command(make_config(tmp_path / "nothing", language_model, tmp_path / "run")))
    assert "holds no cache" in error


def test_the_shipped_config_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    from cache_store.command_line import to_config
    from trainer.cli import build_parser
    from trainer.config import TrainConfig

    parser, commands = build_parser()
    arguments = parser.parse_args(["train", f"--config={ROOT}/configs/train_llava_cc3m.yaml"])
    config = to_config(TrainConfig, commands["train"], arguments["train"])
    assert config.data.micro_batch_size(world_size=8) >= 1
