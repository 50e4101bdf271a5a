"""Get the answers that `trainer generate` reports, and those of the code on an exported model card."""

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cache_store import open_joined
from trainer import load_projector
from trainer.cli import main
from trainer.config import TrainConfig
from trainer.data.stream import as_tensors
from trainer.generate.rows import sample_numbers


def filled(texts: Sequence[str], **places: object) -> list[str]:
    """Put places in for their names."""
    for name, place in places.items():
        texts = [text.replace(name, str(place)) for text in texts]
    return list(texts)


def reported(place: Path, report: Path, *options: str) -> list[dict[str, Any]]:
    """Run `trainer generate`; return the answers of its report."""
    assert main(["generate", str(place), *options, f"--report={report}"]) == 0
    answers: list[dict[str, Any]] = json.loads(report.read_text())["answers"]
    return answers


def export_and_ask(config: TrainConfig, home: Path, rows: Sequence[int] = (1, 8)) -> str:
    """Export a run; assert that the code on its card projects and answers as the program does; return the card.

    The code imports nothing of ours; only the language model's place has to be filled in.
    """
    folder, model = home / "exported", config.model.language_model
    assert main(["export", str(config.run.folder), str(folder)]) == 0
    ask = [f"--rows={','.join(map(str, rows))}", "--prompt=what is this", "--max_tokens=8"]
    ask += [f"--caches={json.dumps(config.towers)}", f"--language_model={model}"]
    expected = [each["answer"] for each in reported(folder, home / "report.json", *ask)]
    card = (folder / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(code.splitlines()) < 55
    assert not re.search("trainer|cache_store|encode_once", code)
    names: dict[str, Any] = {}
    with contextlib.chdir(folder):
        exec(code.replace(f"./{Path(model).name}", model), names)
    cache = open_joined(config.towers)
    read = as_tensors(cache.read(sample_numbers(cache, rows)))
    for place, answer in enumerate(expected):
        samples = {name: each[[place]] for name, each in read.items()}
        given = samples if len(samples) > 1 else samples.popitem()[1]
        assert torch.allclose(names["project"](given), load_projector(folder)(given), atol=1e-5)
        assert names["answer"](given, "what is this", 8) == answer
    return card
