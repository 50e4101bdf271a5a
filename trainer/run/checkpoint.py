"""Checkpoints: one folder each, whole or absent, tied to the cache and the settings that they were trained with.

OUTPUT/checkpoints/step-00000500/
    projector.safetensors    the projector, as `trainer/model/projector_file.py` describes it
    optimizer.safetensors    AdamW's moments
    reconstruction.safetensors    the heads of an auxiliary loss, if the run has one
    state.json               step, position, what must match, the resolved config, SHA-256 of the other files; signed
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.optim import Optimizer

from cache_store.errors import CacheError, ConfigError, NewerFormatError
from cache_store.format.record import FORMAT_VERSION, Record, canonical_json, parse_signed, sign
from cache_store.messages import Difference, differences_between, refuse
from cache_store.storage.files import file_sha256
from cache_store.storage.publish import clear_folders, name_in_errors, publish_folder, remove_folder
from trainer.config import TrainConfig, caches_by_option, views_of_run
from trainer.model.model_config import spell_option
from trainer.model.projector import Projectors
from trainer.model.projector_file import PROJECTOR_FILE, ProjectorConfig, load_tensors, read_projector_file

STATE_FILE, OPTIMIZER_FILE, HEADS_FILE = "state.json", "optimizer.safetensors", "reconstruction.safetensors"
TENSOR_FILES = (PROJECTOR_FILE, OPTIMIZER_FILE)
"""Those of every checkpoint; HEADS_FILE is of runs with reconstruction."""

CACHE_IDENTITY, LANGUAGE_MODEL = "cache identity", "language model"


class MustMatch(Record, frozen=True, kw_only=True):
    """Settings that must be equal in a run that resumes: fields by their names, in sections by what they decide."""

    towers: tuple[str, ...]
    """In the order in which the language model reads them."""
    samples: dict[str, str]
    """What each tower's samples mean; no option sets it."""
    model: dict[str, str]
    text: dict[str, str]
    caches: dict[str, str]
    """With the share of samples held out."""
    order: dict[str, str]
    """All that an evaluation need not have: which samples training shows, in which order, and other switches."""

    def differences(self, now: "MustMatch", sections: Sequence[str]) -> list[Difference]:
        """List what differs in these sections; if the towers do, only their names."""
        if self.towers != now.towers:
            return [Difference("towers", ", ".join(self.towers), ", ".join(now.towers))]
        pairs = ((getattr(self, section), getattr(now, section)) for section in sections)
        return [each for pair in pairs for each in differences_between(*pair)]


class CheckpointState(Record, frozen=True):
    """Everything in a checkpoint except its tensors."""

    format_version: int
    step: int
    """Optimizer steps completed."""
    position: int
    """Samples consumed."""
    must_match: MustMatch
    config: dict[str, Any]
    files: dict[str, str]
    """SHA-256 of each tensor file, by name."""
    sha256: str


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of one run."""

    root: Path
    keep_last: int

    def steps(self) -> list[int]:
        """List the steps of all checkpoints; other folders, such as a person's copy, are ignored."""
        names = (re.fullmatch(r"step-(\d{8,})", path.name) for path in self.root.glob("step-*"))
        return sorted(int(name[1]) for name in names if name)

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def newest(self) -> Path | None:
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def save(
        self,
        step: int,
        position: int,
        projector: bytes,
        optimizer: Optimizer,
        must_match: MustMatch,
        config: dict[str, Any],
        heads: nn.Module | None = None,
    ) -> None:
        """Publish a checkpoint, with these bytes of its projector file; delete all but the newest `keep_last`."""
        clear_folders(self.root, "step-*")
        moments = {
            f"{index}.{field}": tensor.contiguous()
            for index, fields in optimizer.state_dict()["state"].items()
            for field, tensor in fields.items()
        }
        parts = {PROJECTOR_FILE: projector, OPTIMIZER_FILE: save(moments)}
        if heads is not None:
            parts[HEADS_FILE] = save(heads.state_dict())
        with publish_folder(self.path(step)) as scratch:
            for name, data in parts.items():
                write_part(scratch, name, data)
            state = CheckpointState(
                format_version=FORMAT_VERSION,
                step=step,
                position=position,
                must_match=must_match,
                config=config,
                files={name: file_sha256(scratch / name) for name in parts},
                sha256="",
            )
            write_part(scratch, STATE_FILE, canonical_json(sign(state)))
        for old in self.steps()[: -self.keep_last]:
            remove_folder(self.path(old))


def write_part(scratch: Path, name: str, data: bytes) -> None:
    # safetensors' own writer raises no OSError on a full disk
    with name_in_errors(scratch / name):
        (scratch / name).write_bytes(data)


def find_checkpoint(folder: CheckpointFolder) -> tuple[Path, CheckpointState] | None:
    """Return the newest checkpoint; None: start anew. CacheError if it has another step's name."""
    if (start := folder.newest()) is None:
        return None
    state = read_state(start)
    if start != folder.path(state.step):
        raise CacheError(
            f"{start} holds step {state.step}: it was renamed or copied; give it the name of that step, or delete it"
        )
    return start, state


def read_state(path: Path) -> CheckpointState:
    """Read a checkpoint's state, and check every file."""
    try:
        state = parse_signed(CheckpointState, (path / STATE_FILE).read_bytes(), STATE_FILE)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path} is not a checkpoint (no {STATE_FILE})") from None
    except NewerFormatError as error:
        raise NewerFormatError(f"checkpoint {path}: {error}") from None
    except CacheError as error:
        raise damaged_checkpoint(path, str(error)) from None
    if set(state.files) - {HEADS_FILE} != set(TENSOR_FILES):
        raise damaged_checkpoint(path, f"{STATE_FILE} lists other files than {' and '.join(TENSOR_FILES)}")
    for name, expected in state.files.items():
        if not (path / name).is_file() or file_sha256(path / name) != expected:
            raise damaged_checkpoint(path, f"{name} does not match its sha256")
    return state


def damaged_checkpoint(path: Path, problem: str) -> CacheError:
    return CacheError(
        f"checkpoint {path} is damaged: {problem}; delete the folder to resume from the checkpoint before it"
    )


def refuse_other_run(path: Path, state: CheckpointState, must_match: MustMatch, config: TrainConfig) -> None:
    """Raise StaleError, with a table of differences, if the checkpoint does not fit this run's `must_match`."""
    differences = state.must_match.differences(must_match, ("caches", "order", "text", "samples", "model"))
    if not differences:
        return
    anew = "to train anew: the same command with --run.output NEW"
    if CACHE_IDENTITY not in {each.field for each in differences}:
        remedy = "to resume from it, restore the settings that it was trained with"
    elif others := differences_between(*map(caches_by_option, (views_of_run(state.config), config.views))):
        differences = [*others, *differences]
        remedy = "to resume from it, name the caches that it was trained from, unchanged and in the same order"
    else:
        remedy = "the cache was extended, rebuilt or replaced since; restore the old one to resume the run"
    refuse(f"checkpoint {path} is of another run", differences, [anew, remedy], held="in the checkpoint")


def refuse_other_projector(path: Path, state: CheckpointState, must_match: MustMatch) -> None:
    """Raise StaleError if an evaluation would use another projector, or samples that were trained on.

    The cache and its split may differ if the latents mean the same, and the order of training always.
    """
    trained, settable = state.must_match, ["text", "model"]
    if not is_of_another_cache(state, must_match):
        settable.append("caches")
    if not (differences := trained.differences(must_match, ["samples", *settable])):
        return
    remedies = [f"to evaluate it, set these fields as in training; {path / STATE_FILE} holds its whole config"]
    if trained.differences(must_match, ["samples"]):
        option = spell_option("caches", trained.towers) if len(trained.towers) > 1 else "--cache"
        held = ", ".join(views_of_run(state.config)[0].values())
        remedies = [f"to evaluate it, name samples such as those that {held} held, with {option}"]
    refuse(f"checkpoint {path} was not trained like this", differences, remedies, held="in the checkpoint")


def is_of_another_cache(state: CheckpointState, must_match: MustMatch) -> bool:
    return state.must_match.caches[CACHE_IDENTITY] != must_match.caches[CACHE_IDENTITY]


def restore_projectors(path: Path, projectors: Projectors) -> ProjectorConfig:
    """Load parameters and statistics from the folder of a run, or of a checkpoint that `read_state` has checked."""
    config, tensors = read_projector_file(file := path / PROJECTOR_FILE)
    load_tensors(projectors, tensors, str(file))
    return config


def load_optimizer(path: Path, optimizer: Optimizer) -> None:
    """Load the optimizer's moments, except those of parameters that no longer learn."""
    groups = optimizer.state_dict()["param_groups"]
    known = {index for group in groups for index in group["params"]}
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in load_file(path / OPTIMIZER_FILE).items():
        index, field = name.split(".")
        if int(index) in known:
            state.setdefault(int(index), {})[field] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def restore_heads(path: Path, heads: nn.Module | None) -> None:
    """Load the heads of reconstruction if both run and checkpoint have them; else they start with new weights."""
    if heads is not None and (path / HEADS_FILE).is_file():
        heads.load_state_dict(load_file(path / HEADS_FILE))
