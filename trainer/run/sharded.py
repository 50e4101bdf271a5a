"""The frozen language model over all ranks (FSDP2): each holds a part of each weight and gathers a layer as it runs.

Rank 0 alone reads the checkpoint, into its host's memory, and sends one weight after another to all ranks. A device
holds its parts and at most one whole weight. The projectors stay whole on every rank.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from cache_store.errors import ModelError
from trainer.model.language_model import LanguageModel
from trainer.model.load_language_model import (
    Transformers,
    check_forward,
    load_every_weight,
    name_model,
    take_language_model,
)
from trainer.run.parallel import World


def load_sharded(name: str, dtype: torch.dtype, world: World) -> tuple[LanguageModel, Transformers]:
    """Load as `load_with_whole` does, a part of each weight on each rank; all ranks call it together."""
    whole = list[Transformers]()
    with name_model(name) as path:
        world.on_main(lambda: whole.append(load_every_weight(path, dtype)))
        full = load_every_weight(path, dtype, torch.device("meta"))
        model = take_language_model(full, image_parts_of=whole[0] if world.is_main else full)
        shard(full, model, world)
        full.to_empty(device=world.device)
        fill(full, whole.pop() if world.is_main else full, world)
        check_forward(model, full)
        assert isinstance(model.head, FSDPModule), "shard wraps the head"
        model.head.reshard()
    return model, full


def shard(full: Transformers, model: LanguageModel, world: World) -> None:
    """Divide each weight among the ranks; a head that shares its weight with the embedding gets a copy."""
    if not (layers := model.layers()):
        raise ModelError("has no known layers for FSDP2 to divide among the ranks; set run.parallel: ddp")
    weight = model.head.weight
    assert isinstance(weight, nn.Parameter), "an output head is a matrix"
    if weight is model.embed.weight:
        model.head.weight = nn.Parameter(torch.empty_like(weight), requires_grad=False)
    mesh = init_device_mesh(world.device.type, (world.size,))
    for module in (*layers, model.embed):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    fully_shard(model.head, mesh=mesh, reshard_after_forward=False)  # its backward pass comes next
    for module in (model.decoder, full):  # `full` is the root, so check_forward runs it first
        fully_shard(module, mesh=mesh, reshard_after_forward=True)


def fill(full: nn.Module, whole: nn.Module, world: World) -> None:
    weights = whole.state_dict() if world.is_main else {}
    kept = {name: weights[name] for name in full.state_dict() if name in weights}
    set_model_state_dict(full, kept, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for name, buffer in full.named_buffers():  # some are in no state dict
        buffer.copy_(whole.get_buffer(name))
        world.broadcast(buffer)
