"""Get the answers that `trainer generate` reports, and those of an exported folder's own code."""

import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cache_store import open_joined
from trainer import load_projector
from trainer.cli import main
from trainer.config import TrainConfig
from trainer.data.draws import as_tensors
from trainer.generate.generate import sample_numbers


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
    """Export a run; assert that its own code projects and answers as the program does; return the card."""
    folder, model = home / "exported", config.model.language_model
    assert main(["export", str(config.run.folder), str(folder)]) == 0
    ask = [f"--rows={','.join(map(str, rows))}", "--prompt=what is this", "--max_tokens=8"]
    ask += [f"--caches={json.dumps(config.towers)}", f"--language_model={model}"]
    expected = [each["answer"] for each in reported(folder, home / "report.json", *ask)]
    alone = runpy.run_path(str(folder / "projector.py"))
    projector, answerer = alone["ExportedProjector"](folder), alone["Answerer"](folder, model)
    cache = open_joined(config.towers)
    read = as_tensors(cache.read(sample_numbers(cache, rows)))
    for place, answer in enumerate(expected):
        samples = {name: each[[place]] for name, each in read.items()}
        given = samples if len(samples) > 1 else samples.popitem()[1]
        assert torch.allclose(projector(given), load_projector(folder)(given), atol=1e-5)
        assert answerer(given, "what is this", 8) == answer
    card, local = (folder / "README.md").read_text(), f"PATH/{Path(model).name}"
    assert f"trainer generate . --language_model {local} --encoder" in card, "as no file names this machine's folders"
    assert card.count("Answerer(") == card.count(f'Answerer(".", "{local}")(')
    return card
