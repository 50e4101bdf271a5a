"""Train from a cache with Lightning, on any number of processes.

    python examples/lightning_loop.py CACHE OUT --steps 200
    python examples/lightning_loop.py CACHE OUT --steps 200 --devices 2            # Lightning starts the second process
    python examples/lightning_loop.py CACHE OUT --steps 200 --devices 2 --resume   # after any stop

The model restores latents from copies of half their size; put yours in its place. Three points matter:

1. The stream takes rank and world size from the Trainer, and its batch size counts all processes together. So set
   `use_distributed_sampler=False`; any number of processes then trains on the same batches.
2. The stream never ends, so `max_steps` sets the length of the run.
3. The position is the DataModule's state, in Lightning's own checkpoint. It is recorded when a batch is trained on, not
   when it is read: Lightning reads one batch ahead, and the workers more.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from encode_once import CacheError, EncodeOnceError, LatentStream, open_cache

SAVE_EVERY = 25


class Latents(LightningDataModule):
    def __init__(self, path: str, batch_size: int) -> None:
        super().__init__()
        self.cache, self.batch_size, self.cursor = open_cache(path), batch_size, 0

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        self.stream = LatentStream(self.cache, self.batch_size, seed=0, epochs=None, rank=rank, world_size=world_size)

    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        return DataLoader(self.stream, batch_size=None, num_workers=2)

    def on_after_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> dict[str, Any]:
        self.cursor = batch["cursor"]
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {**self.stream.state_dict(), "cursor": self.cursor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.stream.load_state_dict(state_dict)  # refuses another cache, seed or batch size
        self.cursor = state_dict["cursor"]


class Upscaler(LightningModule):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        if len(shape) != 3:
            raise CacheError(f"this model needs latents of a VAE, [channel, y, x]; these are {list(shape)}")
        layers = [nn.Conv2d(shape[0], 64, 3, padding=1), nn.SiLU(), nn.Conv2d(64, shape[0], 3, padding=1)]
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        latents_NCHW = batch["latents"].float()
        halved = F.avg_pool2d(latents_NCHW, 2, ceil_mode=True)
        loss = F.mse_loss(self.layers(F.interpolate(halved, size=latents_NCHW.shape[-2:])), latents_NCHW)
        mean, numbers = self.trainer.strategy.reduce(loss.detach().clone()), batch["numbers"][:4].tolist()
        self.print(f"step {self.global_step + 1}  loss {mean.item():.6f}  samples {numbers} …", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(path: str, out: Path, steps: int, batch_size: int, devices: int, resume: bool) -> None:
    torch.manual_seed(0)
    latents = Latents(path, batch_size)
    model = Upscaler(latents.cache.arrays[0].shape)
    # One file, which Lightning replaces as a whole.
    saving = ModelCheckpoint(out, "checkpoint", every_n_train_steps=SAVE_EVERY, enable_version_counter=False)
    trainer = Trainer(
        max_steps=steps,
        devices=devices,
        use_distributed_sampler=False,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if trainer.is_global_zero:
        out.mkdir(parents=True, exist_ok=resume)
    checkpoint = out / "checkpoint.ckpt"
    resumed_from = checkpoint if resume and checkpoint.exists() else None
    trainer.fit(model, latents, ckpt_path=resumed_from, weights_only=True)
    trainer.save_checkpoint(checkpoint, weights_only=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small latent upscaler from a cache, with Lightning.")
    parser.add_argument("path", metavar="CACHE", help="a sealed cache of a VAE's latents")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for the checkpoint; a new one, unless --resume")
    parser.add_argument("--steps", metavar="N", type=int, default=200, help="steps of the whole run (default: 200)")
    parser.add_argument("--batch-size", metavar="N", type=int, default=32, help="samples a step, in all (default: 32)")
    parser.add_argument("--devices", metavar="N", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in OUT, if any")
    try:
        train(**vars(parser.parse_args()))
    except FileExistsError as error:
        parser.exit(2, f"{parser.prog}: error: {error.filename} exists; add --resume to continue it\n")
    except (EncodeOnceError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
