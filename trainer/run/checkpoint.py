"""Checkpoints: one folder each, whole or absent, tied to the cache and the settings that they were trained with.

OUTPUT/checkpoints/step-00000500/
    projector.safetensors    the projector, as `trainer/model/projector_file.py` describes it
    optimizer.safetensors    AdamW's moments
    reconstruction.safetensors    the heads of an auxiliary loss, if the run has one
    state.json               step, position, what must match, the resolved config, SHA-256 of the other files; signed
"""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor, nn

from cache_store.errors import CacheError, ConfigError, NewerFormatError
from cache_store.format.record import FORMAT_VERSION, Record, canonical_json, parse_signed, sign
from cache_store.messages import differences_between, refuse
from cache_store.storage.files import file_sha256
from cache_store.storage.publish import clear_folders, name_in_errors, publish_folder, remove_folder
from trainer.config import TrainConfig, caches_by_option, views_of_run
from trainer.model.model_config import spell_option
from trainer.model.projector import Projectors
from trainer.model.projector_file import PROJECTOR_FILE, ProjectorConfig, load_tensors, read_projector_file
from trainer.model.towers import TOWERS
from trainer.run.optim import Optimizer

STATE_FILE, OPTIMIZER_FILE, HEADS_FILE = "state.json", "optimizer.safetensors", "reconstruction.safetensors"
TENSOR_FILES = (PROJECTOR_FILE, OPTIMIZER_FILE)
"""Files of a checkpoint; only a run with reconstruction has HEADS_FILE."""

CACHE_IDENTITY = "cache identity"
"""Key of `must_match`: the cache a run was trained from."""

TEXTS = "texts of the samples"
"""Key of `must_match`: the captions and conversations in force."""

VAL_FRACTION = "data.val_fraction"
"""Key of `must_match`: the share of samples held out."""

OF_A_TOWER = re.compile(rf"(\w+\.)?(latents|image|encoder|model)\.|{CACHE_IDENTITY}$")
"""Matches fields that always differ if the towers differ."""

OF_THE_CACHE = re.compile(rf"(\w+\.)?(latents|image|encoder)\.|{TOWERS}$")
"""Matches the keys of `must_match` that no option sets: they describe a tower's samples."""

POSTERIOR = "data.posterior"
"""Key of `must_match` if training draws latents from their posteriors."""

SHUFFLE_BLOCK = "data.shuffle_block"
"""Key of `must_match` if samples are shuffled in blocks."""

WHERE = "data.where"
"""Key of `must_match` if only samples that an expression chooses are used."""

DEFAULTS = {POSTERIOR: "mean", SHUFFLE_BLOCK: "1", WHERE: ""}
"""Values that hold if `must_match` leaves their key out."""

ORDER_KEYS = ("data.batch_size", "data.seed", *DEFAULTS)
"""Keys of `must_match` that only decide which samples training shows, and in which order."""


class CheckpointState(Record, frozen=True):
    """Everything in a checkpoint except its tensors."""

    format_version: int
    step: int
    """Optimizer steps completed."""
    position: int
    """Samples consumed."""
    must_match: dict[str, str]
    """Settings that must be equal in a run that resumes from here."""
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
        """List the steps of all checkpoints; folders with other names, such as a copy, are ignored."""
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
        must_match: dict[str, str],
        config: dict[str, Any],
        heads: nn.Module | None = None,
    ) -> None:
        """Delete what a killed run left, publish a checkpoint, then delete all but the newest `keep_last`.

        `projector` is the content of the projector file.
        """
        clear_folders(self.root, "step-*")
        parts = {PROJECTOR_FILE: projector, OPTIMIZER_FILE: save(optimizer_tensors(optimizer))}
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
    """Write one file of a checkpoint, not with safetensors' writer, whose error for a full disk is no OSError."""
    with name_in_errors(scratch / name):
        (scratch / name).write_bytes(data)


def find_checkpoint(folder: CheckpointFolder, resume: str) -> tuple[Path, CheckpointState] | None:
    """Return the checkpoint that `run.resume` names; None: start anew.

    Raise ConfigError if the run would overwrite another run's later checkpoints, and CacheError if the newest folder
    is not named for its step.
    """
    named = {"auto": folder.newest(), "never": None}
    start = named[resume] if resume in named else Path(resume).expanduser()
    state = None if start is None else read_state(start)
    if state is not None and start == folder.newest() != folder.path(state.step):
        raise CacheError(
            f"{start} holds step {state.step}: it was renamed or copied; give it the name of that step, or delete it"
        )
    if later := [step for step in folder.steps() if state is None or step > state.step]:
        raise ConfigError(
            f"run.resume: {resume} would mix two runs: {folder.root} already holds step {later[-1]}; "
            "set another run.output, or run.resume: auto to resume from there"
        )
    return None if start is None or state is None else (start, state)


def read_state(path: Path) -> CheckpointState:
    """Read a checkpoint's state, after checking that every file is as it was saved."""
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


def refuse_other_run(
    path: Path,
    state: CheckpointState,
    must_match: Mapping[str, str],
    config: TrainConfig,
    can_start_from: Callable[[Path], bool],
) -> None:
    """Raise StaleError, with a table of differences, if the checkpoint does not fit this run's `must_match`.

    `can_start_from` tells whether a new run could start from the projector of the run in a folder.
    """
    trained, here = (DEFAULTS | dict(each) for each in (state.must_match, must_match))
    if differences := differences_between(trained, here):
        if any(each.field == TOWERS for each in differences):  # every field of a tower would differ too
            differences = [each for each in differences if not OF_A_TOWER.match(each.field)]
        run, anew = path.parent.parent, "to train anew: the same command with --run.output NEW"
        if can_start_from(run):
            anew += f"; to start from this run's projector, add --model.init_projector {shlex.quote(str(run))}"
        remedies = [anew]
        if CACHE_IDENTITY not in {each.field for each in differences}:
            remedies.append("to resume from it, restore the settings that it was trained with")
        elif not (others := differences_between(*map(caches_by_option, (views_of_run(state.config), config.views)))):
            remedies.append("the cache was extended, rebuilt or replaced since; restore the old one to resume the run")
        else:
            differences = [*others, *differences]
            remedies.append(
                "to resume from it, name the caches that it was trained from, unchanged and in the same order"
            )
        refuse(f"checkpoint {path} is of another run", differences, remedies, held="in the checkpoint")


def refuse_other_projector(path: Path, state: CheckpointState, must_match: Mapping[str, str]) -> None:
    """Raise StaleError if an evaluation would use another projector, or samples that were trained on.

    The order of training may differ. The cache and its split may differ too, if the latents mean the same.
    """
    of_another = (CACHE_IDENTITY, TEXTS, VAL_FRACTION) if is_of_another_cache(state, must_match) else ()
    may_differ = (*ORDER_KEYS, *of_another)
    differences = [each for each in differences_between(state.must_match, must_match) if each.field not in may_differ]
    if differences:
        if other_towers := [each for each in differences if each.field == TOWERS]:
            differences = other_towers  # every field of a tower would differ too
        of_the_cache = [bool(OF_THE_CACHE.match(each.field)) for each in differences]
        remedies = ["to evaluate another checkpoint: --checkpoint FOLDER"]
        if not all(of_the_cache):
            restore = f"to evaluate it, set these fields as in training; {path / STATE_FILE} holds its whole config"
            remedies.insert(0, restore)
        if any(of_the_cache):
            towers = state.must_match.get(TOWERS)  # in their order, which the config does not keep
            option = spell_option("caches", towers.split(", ")) if towers else "--cache"
            held = ", ".join(views_of_run(state.config)[0].values())
            remedies.insert(0, f"to evaluate it, name samples such as those that {held} held, with {option}")
        refuse(f"checkpoint {path} was not trained like this", differences, remedies, held="in the checkpoint")


def is_of_another_cache(state: CheckpointState, must_match: Mapping[str, str]) -> bool:
    return state.must_match.get(CACHE_IDENTITY) != must_match[CACHE_IDENTITY]


def restore_projectors(path: Path, projectors: Projectors) -> ProjectorConfig:
    """Load parameters and statistics from a run's folder, or from a checkpoint that `read_state` has checked."""
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


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{index}.{field}": tensor.contiguous()
        for index, fields in optimizer.state_dict()["state"].items()
        for field, tensor in fields.items()
    }
