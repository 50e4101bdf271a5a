"""A projector's file as projectors: into those of a run, or on its own."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from cache_store.errors import CacheError
from cache_store.storage.files import file_sha256
from trainer.model.config import PRETRAINED
from trainer.model.projectors.file import Tower, read_projector_file
from trainer.model.projectors.joined import Projectors
from trainer.model.projectors.pretrained import PretrainedProjector
from trainer.model.projectors.projector import Projector, TowerProjector


def load_tensors(projectors: Projectors, tensors: Mapping[str, Tensor], where: str) -> None:
    """Give each tower its tensors; CacheError where they are others than it has."""
    for name, each in projectors.items():
        load_tower(each, name, tensors, where)


def load_tower(projector: TowerProjector, tower: str, tensors: Mapping[str, Tensor], where: str) -> None:
    """Give `projector` its tower's tensors; CacheError, and nothing given, where they are others than it has."""
    mine = {name.removeprefix(f"{tower}."): each for name, each in tensors.items() if name.startswith(f"{tower}.")}
    found, expected = ({name: kind(each) for name, each in state.items()} for state in (mine, projector.state_dict()))
    if found != expected:
        name = min(dict(found.items() ^ expected.items()))
        raise CacheError(
            f"{where} does not hold the tensors of its projector: {tower}.{name} should be "
            f"{expected.get(name, 'absent')}, is {found.get(name, 'absent')}"
        )
    projector.load_state_dict(mine, assign=any(each.is_meta for each in projector.state_dict().values()))


def kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


class TrainedProjector(Projectors):
    """The projectors as they were trained: on the CPU, in float32, frozen."""

    def __init__(self, path: Path) -> None:
        config, tensors = read_projector_file(path)
        with torch.device("meta"):  # its size is only what the config says, until the tensors agree
            towers = {
                tower.name: without_weights(tower, config.language_model.width, tensors) for tower in config.towers
            }
        super().__init__(towers, config.full)
        self.config, self.path, self.sha256 = config, path, file_sha256(path)
        load_tensors(self, tensors, str(path))
        self.requires_grad_(False).eval()


def without_weights(tower: Tower, width: int, tensors: Mapping[str, Tensor]) -> TowerProjector:
    """A tower's projector as its description says; `tensors` tell how many channels of a sample are read."""
    ends = torch.empty(2, width) if tower.ends else None
    if tower.projector == PRETRAINED:
        assert tower.norm_eps is not None, "as is_known has checked"
        return PretrainedProjector(
            sample_shape=tower.array.shape,
            width=width,
            num_world_tokens=tower.tokens - 2 * tower.ends,
            norm_eps=tower.norm_eps,
            ends=ends,
        )
    mean = tensors.get(f"{tower.name}.mean")
    channels = 1 if mean is None or not mean.ndim else max(1, len(mean))
    return Projector(
        sample_shape=tower.array.shape,
        width=width,
        layout=tower.layout,
        shape=tower.projector,
        mean=[0.0] * channels,
        std=[1.0] * channels,
        seed=0,
        ends=ends,
    )
