"""Which folders a run may have for its output."""

from pathlib import Path

import pytest

from cache_store.errors import ConfigError
from tests.trainer.run.test_checkpoint import save_steps
from tests.trainer.runs import command
from trainer.cli import main
from trainer.run.folder import CONFIG_FILE, checkpoints_of, refuse_foreign_output, write_config


def fill(folder: Path, files: dict[str, str]) -> dict[str, bytes]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return held_in(folder)


def held_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"thesis.tex": ""}, "thesis.tex"),
        ({"config.yaml": "cache: /home/.cache\nlearning_rate: 1\n"}, "config.yaml"),
        ({"config.yaml": "\0"}, "config.yaml"),
        ({"metrics.jsonl": '{"epoch": 3}\n'}, "metrics.jsonl"),
        ({"checkpoints/last.ckpt": "", "projector.safetensors": ""}, "checkpoints"),
        ({"llava/config.yaml": ""}, "llava"),
    ],
)
def test_a_folder_of_other_files_is_refused_and_left_as_it_is(configured, refusal, tmp_path, files, named):
    before = fill(tmp_path / "run", files)
    expected = f"run.output: {tmp_path}/run holds {named!r} but no run; name an empty or a new folder"
    assert refusal(2, configured()) == f"trainer: error: {expected}\n"
    assert held_in(tmp_path / "run") == before


def test_the_folder_itself_is_no_place_for_the_text(configured, refusal, tmp_path):
    error = refusal(2, configured(), "train", "--data.text_dir", f"{tmp_path}/run/")
    assert f"data.text_dir: {tmp_path}/run/ is run.output; name a folder in it" in error
    assert not (tmp_path / "run").exists()


NOTES = {"metrics.jsonl": "", "notes.txt": ""}

STAGES = {
    "absent": lambda config: None,
    "empty": lambda config: config.run.folder.mkdir(),
    "killed in its first seconds": lambda config: fill(config.run.folder, {".claim": "", ".config.yaml.1.partial": ""}),
    "killed before its first checkpoint": lambda config: (write_config(config), fill(config.run.folder, NOTES)),
    "its config deleted": lambda config: (
        save_steps(checkpoints_of(config.run).root, 5),
        fill(config.run.folder, NOTES),
    ),
}


@pytest.mark.parametrize("leave", STAGES.values(), ids=STAGES)
def test_an_empty_folder_and_a_run_at_any_stage_are_taken(configured, leave):
    leave(config := configured())
    refuse_foreign_output(config)


def test_text_that_is_kept_in_the_output_is_no_foreign_file(configured, tmp_path):
    texts = tmp_path / "run" / "made" / "text"
    config = configured(text_dir=str(texts))
    fill(texts, {".lock": ""})
    refuse_foreign_output(config)
    fill(tmp_path / "run", {"thesis.tex": ""})
    with pytest.raises(ConfigError, match="holds 'thesis.tex' but no run"):
        refuse_foreign_output(config)


def test_a_run_that_has_no_step_to_do_can_be_run_again(configured, capsys):
    first = configured("first", max_steps=1)
    assert main(command(first)) == 0
    checkpoint = str(first.run.folder / "checkpoints" / "step-00000001")
    second = configured("second", max_steps=1, resume=checkpoint)
    for _ in range(2):
        assert main(command(second)) == 0
        assert "nothing to do: step 1 is done" in capsys.readouterr().out
    assert (second.run.folder / CONFIG_FILE).is_file()
