"""Train from a cache in a loop of plain PyTorch, with a checkpoint that resumes exactly.

    python examples/plain_pytorch.py CACHE OUT --steps 200            # stop it: Ctrl-C, kill -9
    python examples/plain_pytorch.py CACHE OUT --steps 200 --resume   # the same losses as without the stop

The model restores latents from copies of half their size; put yours in its place. Three points matter:

1. The stream gives whole, shuffled batches, so the DataLoader has `batch_size=None`. Its workers read ahead; any number
   of workers gives the same batches. (Reading a cache is so fast that `num_workers=0` is often enough.)
2. To resume, save `batch["cursor"]` of the last batch trained on with the weights; nothing else is needed.
3. A model that draws random numbers must also save `torch.get_rng_state()`; this one draws none.

To train on some of the samples, such as a split of yours, give the stream `samples=` and their numbers.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

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
    model = make_model(cache.arrays[0].shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint, done = out / "checkpoint.pt", 0
    out.mkdir(parents=True, exist_ok=resume)
    if resume and checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        stream.load_state_dict(saved["stream"])
        done = saved["step"]
    print(f"{done} steps are done", flush=True)

    loader = DataLoader(stream, batch_size=None, num_workers=2)
    for step, batch in zip(range(done + 1, steps + 1), loader, strict=False):
        loss = loss_of(model, batch["latents"].to(device).float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.6f}  samples {batch['numbers'][:4].tolist()} …", flush=True)
        if step % SAVE_EVERY == 0 or step == steps:
            # The rest of the stream's state lets it refuse another cache, seed or batch size.
            state = {"step": step, "stream": {**stream.state_dict(), "cursor": batch["cursor"]}}
            state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, out / "checkpoint.new")
            (out / "checkpoint.new").replace(checkpoint)  # always a complete file: the old one or the new one


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small latent upscaler from a cache, in plain PyTorch.")
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
