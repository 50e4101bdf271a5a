"""The demo's inputs, made and saved as any user's would be: a data set and two model folders."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers.utils import logging

from cache_store.errors import ConfigError
from demo.config import DemoConfig
from demo.dataset import Sample, is_held_out, samples, write_dataset
from demo.language_model import Caption, Lesson, make_language_model, train_on_text
from demo.scenes import draw
from demo.tokenizer import make_tokenizer
from demo.vae import STATISTICS_IMAGES, make_vae
from trainer.text.tokenizer import load_chat_tokenizer

MARKER = ".made-by-the-demo"


def prepare_folder(root: Path) -> bool:
    """Make an empty folder with the demo's marker; return whether a previous demo's folder was deleted.

    Raises ConfigError for a folder that the demo did not make.
    """
    is_ours = (root / MARKER).is_file()
    if root.exists() and not is_ours and (not root.is_dir() or any(root.iterdir())):
        raise ConfigError(f"output: {root} was not made by the demo, so it will not be replaced; name another folder")
    if is_ours:
        shutil.rmtree(root)
    root.mkdir(parents=True, exist_ok=True)
    (root / MARKER).touch()
    return is_ours


def make_data(config: DemoConfig) -> list[Sample]:
    drawn = list(samples(config.scenes, config.seed))
    write_dataset(Path(config.build_config().source.path).parent, drawn)
    return drawn


def save_vae(config: DemoConfig, drawn: Sequence[Sample]) -> None:
    """Save a VAE with random weights, in the same subfolder as in a Cosmos checkpoint."""
    images = np.stack([np.asarray(draw(sample.scene)) for sample in drawn[:STATISTICS_IMAGES]])
    make_vae(images, config.seed).save_pretrained(Path(config.build_config().encoder.model) / "vae")


def save_language_model(config: DemoConfig, drawn: Sequence[Sample]) -> float:
    """Train and save tokenizer and model on the texts of the training part only; return the last text loss."""
    # Progress bars of saving a megabyte would only hide the demo's own lines.
    logging.disable_progress_bar()
    train_config = config.train_config()
    folder = train_config.model.language_model
    train_part = [sample for sample in drawn if not is_held_out(sample.id, train_config.data.val_fraction)]
    conversations = [sample.conversation for sample in train_part]
    tokenizer = make_tokenizer(conversations)
    tokenizer.save_pretrained(folder)
    chat = load_chat_tokenizer(folder, None, train_config.data.max_text_tokens)
    texts = chat([sample.id for sample in train_part], conversations)
    lessons = [Lesson(Caption.from_scene(sample.scene), text) for sample, text in zip(train_part, texts, strict=True)]
    model = make_language_model(tokenizer, config.seed)
    loss = train_on_text(model, tokenizer, lessons, config.text_steps, config.seed)
    model.save_pretrained(folder)
    return loss
