"""The frozen language model over all ranks (FSDP2): each holds a part of each weight and gathers a layer as it runs.

Rank 0 alone reads the checkpoint, into its host's memory, and sends one weight after another to all ranks. A device
holds its parts and at most one whole weight. The projectors stay whole on every rank.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

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
    """Load as `load_with_whole` does, but a part of each weight on each rank; all ranks call it together."""
    whole = list[Transformers]()
    with name_model(name) as path:
        world.on_main(lambda: whole.append(load_every_weight(path, dtype)))
        full = load_every_weight(path, dtype, torch.device("meta"))
        model = take_language_model(full, image_parts_of=whole[0] if world.is_main else full)
        shard(full, model, world)
        full.to_empty(device=world.device)
        fill(full, whole.pop() if world.is_main else None, world)
        check_forward(model, full)
        assert isinstance(model.head, FSDPModule), "shard wraps the head"
        model.head.reshard()
    return model, full


def shard(full: Transformers, model: LanguageModel, world: World) -> None:
    """Divide each weight of layers, embedding, head and the rest of the decoder among the ranks.

    A head that shares its weight with the embedding gets a copy, so that neither is gathered for the other.
    """
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


def fill(full: nn.Module, whole: nn.Module | None, world: World) -> None:
    """Fill this rank's parts of the weights, and all buffers, from the model that rank 0 has as `whole`."""
    for name, target in [*full.named_parameters(), *full.named_buffers()]:
        if whole is None:
            value = torch.empty(target.shape, dtype=target.dtype, device=world.device)
        else:
            value = tensor_of(whole, name).detach().to(world.device).contiguous()
        world.broadcast(value)
        with torch.no_grad():
            if isinstance(target, DTensor):
                target.to_local().copy_(rank_part(value, world))
            else:
                target.copy_(value)


def tensor_of(module: nn.Module, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    found: Tensor = getattr(module.get_submodule(owner), last)
    return found


def rank_part(value: Tensor, world: World) -> Tensor:
    """Cut out this rank's rows as FSDP2 does; the last ranks may have fewer, or none."""
    parts = torch.chunk(value, world.size)
    return parts[world.rank] if world.rank < len(parts) else value[:0]
