"""An exported folder is all that its users need, with this program or without it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from cache_store import open_cache
from tests.named import assert_names
from tests.trainer.answers import export_and_ask, filled
from tests.trainer.conftest import MakeConfig
from tests.trainer.runs import metrics, train_alone
from trainer import load_projector
from trainer.cli import main
from trainer.config import TrainConfig
from trainer.model.projector_file import CONFIG_FILE, PROJECTOR_FILE
from trainer.run.folder import checkpoints_of

FILES = ["README.md", CONFIG_FILE, "projector.py", PROJECTOR_FILE]


@pytest.fixture(scope="module")
def trained(configured_here: MakeConfig) -> TrainConfig:
    return train_alone(configured_here("trained", max_steps=12, save_every=6, val_fraction=0.2))


def exported(place: Path, folder: Path) -> Path:
    assert main(["export", str(place), str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == FILES
    return folder


@pytest.mark.parametrize(("layout", "shape"), [("channel", "linear"), ("spatial", "mlp"), ("channel", "mlp_gelu")])
def test_the_exported_code_says_what_generate_says(configured, tmp_path, layout, shape):
    config = train_alone(configured(max_steps=2, layout=layout, projector=shape))
    assert "print(Answerer(" in export_and_ask(config, tmp_path)


ALONE = """
import sys
from safetensors.torch import load_file, save_file
samples = load_file("latents.safetensors")["latents"]
sys.path.insert(0, ".")
CODE
assert not {"trainer", "cache_store", "precompute", "transformers"} & {*sys.modules}
save_file({"tokens": tokens}, "tokens.safetensors")
"""


def test_the_exported_file_alone_gives_the_tokens_of_the_trained_projector(trained, tmp_path):
    """As the card says, in a process that imports nothing of this program."""
    folder = exported(trained.run.folder, tmp_path / "exported")
    (code,) = re.findall(r"```python\n(.*?)print", (folder / "README.md").read_text(), re.DOTALL)
    cache = open_cache(trained.cache)
    latents = torch.from_numpy(cache.read(np.arange(len(cache))))
    save_file({"latents": latents}, folder / "latents.safetensors")
    command = [sys.executable, "-I", "-c", ALONE.replace("CODE", code)]
    subprocess.run(command, cwd=folder, check=True)
    tokens = load_file(folder / "tokens.safetensors")["tokens"]
    assert torch.allclose(tokens, load_projector(trained.run.folder)(latents), atol=1e-6)


def test_the_card_shows_the_runs_figures_in_forty_lines(trained, tmp_path):
    folder, run = exported(trained.run.folder, tmp_path / "exported"), trained.run.folder
    _, header, text = (folder / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "encode-once"
    own, other = (metrics(run, key)[12] for key in ("val_loss", "val_loss_shuffled"))
    loss = np.mean([metrics(run)[step] for step in range(3, 13)])
    figures = f"{loss:.4f} {own:.4f}, {other:.4f}: {other - own:.4f}"
    assert_names(text, f"AutoencoderKLWan lm0 {figures} 16x24, squash, bilinear")
    for words in ("12 steps, 96 samples", "[channel 4, latent_y 3, latent_x 2]", "8 tokens"):
        assert words in text
    assert len((folder / "README.md").read_text().splitlines()) <= 40
    earlier = exported(checkpoints_of(trained.run).path(6), tmp_path / "earlier")
    assert "6 steps, 48 samples" in (earlier / "README.md").read_text()


def test_an_export_names_no_folder_of_this_machine(trained, tmp_path):
    """It loads as it was trained; equal exports are equal bytes."""
    first, again = (exported(trained.run.folder, tmp_path / name) for name in ("first", "again"))
    for name in FILES:
        data = (first / name).read_bytes()
        assert data == (again / name).read_bytes()
        assert os.fsencode(Path(trained.model.language_model).parent) not in data
    projector, own = load_projector(first), load_projector(trained.run.folder)
    assert all(torch.equal(each, own.state_dict()[name]) for name, each in projector.state_dict().items())
    assert main(["export", str(first / PROJECTOR_FILE), str(tmp_path / "from a file")]) == 0
    assert (tmp_path / "from a file" / PROJECTOR_FILE).read_bytes() == (first / PROJECTOR_FILE).read_bytes()


REFUSED = [
    (["RUN", "HOME/full/thesis.tex"], "thesis.tex"),
    (["RUN", "s3://bucket/new"], "folder: s3://bucket/new"),
    (["RUN", "CACHE/exported"], "folder: CACHE/exported"),
    (["HOME/none", "HOME/new"], "HOME/none"),
]


@pytest.mark.parametrize(("arguments", "named"), REFUSED)
def test_an_export_that_cannot_be_leaves_nothing(trained, tmp_path, capsys, arguments, named):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    places = {"RUN": trained.run.folder, "CACHE": trained.cache, "HOME": tmp_path}
    *arguments, named = filled([*arguments, named], **places)
    assert main(["export", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
