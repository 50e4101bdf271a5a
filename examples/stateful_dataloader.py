"""Train from a cache with torchdata's StatefulDataLoader, and save its state in the middle of an epoch.

    python examples/stateful_dataloader.py CACHE OUT --steps 200            # stop it: Ctrl-C, kill -9
    python examples/stateful_dataloader.py CACHE OUT --steps 200 --resume   # the same losses as without the stop

The model restores latents from copies of half their size; put yours in its place. Three points matter:

1. The stream gives whole, shuffled batches, so the loader has `batch_size=None`.
2. `loader.state_dict()` asks the stream in each worker for its state. It belongs to the last batch taken, however far
   the workers have read ahead. `load_state_dict` restores each worker's state, so that no batch is read twice.
3. This state needs the same `num_workers`. If that may change, save `batch["cursor"]` (see plain_pytorch.py).
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchdata.stateful_dataloader import StatefulDataLoader

from encode_once import CacheError, EncodeOnceError, LatentStream, open_cache

SAVE_EVERY = 25


def make_model(shape: tuple[int, ...]) -> nn.Module:
    if len(shape) != 3:
        raise CacheError(f"this model needs latents of a VAE, [channel, y, x]; these are {list(shape)}")
    return nn.Sequential(nn.Conv2d(shape[0], 64, 3, padding=1), nn.SiLU(), nn.Conv2d(64, shape[0], 3, padding=1))


def loss_of(model: nn.Module, latents_NCHW: Tensor) -> Tensor:
    halved = F.avg_pool2d(latents_NCHW, 2, ceil_mode=True)
    return F.mse_loss(model(F.interpolate(halved, size=latents_NCHW.shape[-2:])), latents_NCHW)


def train(path: str, out: Path, steps: int, batch_size: int, resume: bool) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cache = open_cache(path)
    stream = LatentStream(cache, batch_size, seed=0, epochs=None)
    loader = StatefulDataLoader(stream, batch_size=None, num_workers=2)
    model = make_model(cache.arrays[0].shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint, done = out / "checkpoint.pt", 0
    out.mkdir(parents=True, exist_ok=resume)
    if resume and checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        done = saved["step"]
    print(f"{done} steps are done", flush=True)

    for step, batch in zip(range(done + 1, steps + 1), loader, strict=False):
        loss = loss_of(model, batch["latents"].to(device).float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.6f}  samples {batch['numbers'][:4].tolist()} …", flush=True)
        if step % SAVE_EVERY == 0 or step == steps:
            state = {"step": step, "loader": loader.state_dict()}
            state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, out / "checkpoint.new")
            (out / "checkpoint.new").replace(checkpoint)  # always a complete file: the old one or the new one


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small latent upscaler from a cache, with StatefulDataLoader.")
    parser.add_argument("path", metavar="CACHE", help="a sealed cache of a VAE's latents")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for the checkpoint; a new one, unless --resume")
    parser.add_argument("--steps", metavar="N", type=int, default=200, help="steps of the whole run (default: 200)")
    parser.add_argument("--batch-size", metavar="N", type=int, default=32, help="samples a step (default: 32)")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in OUT, if any")
    try:
        train(**vars(parser.parse_args()))
    except FileExistsError as error:
        parser.exit(2, f"{parser.prog}: error: {error.filename} exists; add --resume to continue it\n")
    except (EncodeOnceError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(3, "stopped; add --resume to continue\n")
