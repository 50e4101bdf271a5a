"""Train from a cache with Hugging Face Accelerate, on any number of processes.

    python examples/accelerate_loop.py CACHE OUT --steps 200
    torchrun --nproc-per-node 2 examples/accelerate_loop.py CACHE OUT --steps 200            # or accelerate launch
    torchrun --nproc-per-node 2 examples/accelerate_loop.py CACHE OUT --steps 200 --resume   # after any stop

The model restores latents from copies of half their size; put yours in its place. Three points matter:

1. The stream takes rank and world size from Accelerate, and its batch size counts all processes together. So any number
   of processes trains on the same batches.
2. So do not pass it to `accelerator.prepare`, which would divide the batches among the processes again (and cannot
   divide whole batches: with two processes it fails at the first one).
3. `register_for_checkpointing(stream)` adds its position to `save_state`. The last batch taken counts as trained on, so
   save after the step. (This holds without DataLoader workers, which latents seldom need.)
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from encode_once import CacheError, EncodeOnceError, LatentStream, open_cache

SAVE_EVERY = 25


def make_model(shape: tuple[int, ...]) -> nn.Module:
    if len(shape) != 3:
        raise CacheError(f"this model needs latents of a VAE, [channel, y, x]; these are {list(shape)}")
    return nn.Sequential(nn.Conv2d(shape[0], 64, 3, padding=1), nn.SiLU(), nn.Conv2d(64, shape[0], 3, padding=1))


def loss_of(model: nn.Module, latents_NCHW: Tensor) -> Tensor:
    halved = F.avg_pool2d(latents_NCHW, 2, ceil_mode=True)
    return F.mse_loss(model(F.interpolate(halved, size=latents_NCHW.shape[-2:])), latents_NCHW)


def save(accelerator: Accelerator, out: Path, step: int) -> None:
    """Write all files elsewhere first, so that a folder named `step-…` is always complete."""
    accelerator.save_state(str(out / "unfinished"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (out / "unfinished").rename(out / f"step-{step:06d}")


def train(path: str, out: Path, steps: int, batch_size: int, resume: bool) -> None:
    torch.manual_seed(0)
    # Without a GPU, Accelerate does not see torchrun's other processes unless it is told about them.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    rank, world_size = accelerator.process_index, accelerator.num_processes
    cache = open_cache(path)
    stream = LatentStream(cache, batch_size, seed=0, epochs=None, rank=rank, world_size=world_size)
    model = make_model(cache.arrays[0].shape)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    accelerator.register_for_checkpointing(stream)
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=resume)
    if checkpoints := sorted(out.glob("step-*")) if resume else []:
        accelerator.load_state(str(checkpoints[-1]))
    done = stream.state_dict()["cursor"] // batch_size
    accelerator.print(f"{done} steps are done", flush=True)

    for step, batch in zip(range(done + 1, steps + 1), stream, strict=False):
        loss = loss_of(model, batch["latents"].to(accelerator.device).float())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"step {step}  loss {mean:.6f}  samples {batch['numbers'][:4].tolist()} …", flush=True)
        if step % SAVE_EVERY == 0 or step == steps:
            save(accelerator, out, step)
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small latent upscaler from a cache, with Accelerate.")
    parser.add_argument("path", metavar="CACHE", help="a sealed cache of a VAE's latents")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for checkpoints; a new one, unless --resume")
    parser.add_argument("--steps", metavar="N", type=int, default=200, help="steps of the whole run (default: 200)")
    parser.add_argument("--batch-size", metavar="N", type=int, default=32, help="samples a step, in all (default: 32)")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in OUT, if any")
    try:
        train(**vars(parser.parse_args()))
    except FileExistsError as error:
        parser.exit(2, f"{parser.prog}: error: {error.filename} exists; add --resume to continue it\n")
    except (EncodeOnceError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(3, "stopped; add --resume to continue\n")
