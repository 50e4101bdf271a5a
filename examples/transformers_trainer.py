"""Train from a cache with the Trainer of transformers, on any number of processes.

    python examples/transformers_trainer.py CACHE OUT --steps 200
    torchrun --nproc-per-node 2 examples/transformers_trainer.py CACHE OUT --steps 200            # stop it: Ctrl-C
    torchrun --nproc-per-node 2 examples/transformers_trainer.py CACHE OUT --steps 200 --resume   # the same batches

The model restores latents from copies of half their size; put yours in its place. Three points matter:

1. `get_train_dataloader` returns the stream's loader as it is. The Trainer's own would collate whole batches, and
   Accelerate, which it asks to prepare a loader, would divide them among the processes once more; the stream refuses
   that. `dispatch_batches` and `split_batches` change nothing here.
2. `epochs=None`, with `max_steps`: the Trainer counts steps, and a pass that ends would upset its count on a resume.
3. On a resume the stream jumps to its place; `ignore_data_skip=True` keeps the Trainer from skipping batches once more.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from encode_once import CacheError, EncodeOnceError, LatentStream, open_cache

SAVE_EVERY = 25
POSITION = "stream.json"


class Upscaler(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        if len(shape) != 3:
            raise CacheError(f"this model needs latents of a VAE, [channel, y, x]; these are {list(shape)}")
        layers = [nn.Conv2d(shape[0], 64, 3, padding=1), nn.SiLU(), nn.Conv2d(64, shape[0], 3, padding=1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, latents: Tensor, **others: Any) -> dict[str, Tensor]:
        latents_NCHW = latents.float()
        halved = F.avg_pool2d(latents_NCHW, 2, ceil_mode=True)
        restored = self.layers(F.interpolate(halved, size=latents_NCHW.shape[-2:]))
        return {"loss": F.mse_loss(restored, latents_NCHW)}


class SavePosition(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    def __init__(self, stream: LatentStream) -> None:
        self.stream = stream

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write the stream's position beside the Trainer's own files, as the last of them."""
        cursor = state.global_step * args.gradient_accumulation_steps * self.stream.batch_size
        file = Path(args.output_dir, f"checkpoint-{state.global_step}", POSITION)
        if state.is_world_process_zero:
            file.write_text(json.dumps({**self.stream.state_dict(), "cursor": cursor}))


class LatentTrainer(Trainer):  # type: ignore[misc]
    def __init__(self, stream: LatentStream, **options: Any) -> None:
        super().__init__(callbacks=[SavePosition(stream)], **options)
        self.stream = stream

    def get_train_dataloader(self) -> DataLoader[dict[str, Any]]:
        return DataLoader(self.stream, batch_size=None, num_workers=self.args.dataloader_num_workers)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], **options: Any) -> Tensor:
        loss: Tensor = super().compute_loss(model, inputs, **options)
        mean, numbers = self.accelerator.reduce(loss.detach(), "mean").item(), inputs["numbers"][:4].tolist()
        self.accelerator.print(f"step {self.state.global_step + 1}  loss {mean:.6f}  samples {numbers} …", flush=True)
        return loss


def train(path: str, out: Path, steps: int, batch_size: int, resume: bool) -> None:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(out),
        max_steps=steps,
        save_steps=SAVE_EVERY,
        ignore_data_skip=True,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        dataloader_num_workers=2,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    rank, world_size = arguments.process_index, arguments.world_size
    arguments.per_device_train_batch_size = batch_size // world_size  # only for the Trainer's own figures
    cache = open_cache(path)
    stream = LatentStream(cache, batch_size, seed=0, epochs=None, rank=rank, world_size=world_size)
    model = Upscaler(cache.arrays[0].shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if rank == 0:
        out.mkdir(parents=True, exist_ok=resume)
    trainer = LatentTrainer(stream, model=model, args=arguments, optimizers=(optimizer, None))
    saved = sorted(out.glob(f"checkpoint-*/{POSITION}"), key=lambda file: int(file.parent.name.partition("-")[2]))
    if resume and saved:
        stream.load_state_dict(json.loads(saved[-1].read_text()))  # refuses another cache, seed or batch size
        if stream.state_dict()["cursor"] >= steps * batch_size:
            return  # the Trainer would do one more step
    trainer.train(resume_from_checkpoint=str(saved[-1].parent) if resume and saved else None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small latent upscaler from a cache, with transformers.")
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
