"""Train a LoRA of a Wan video model from a cache of clips and the cache of their captions.

    python examples/wan_lora.py Wan-AI/Wan2.1-T2V-1.3B-Diffusers OUT --latents CACHE --text CACHE --steps 200
    python examples/wan_lora.py Wan-AI/Wan2.1-T2V-1.3B-Diffusers OUT …the same… --resume           # after any stop

For the text-to-video models of Wan 2.1, and for Wan 2.2's 5B. Each batch has one size and one number of frames.
A checkpoint holds the LoRA, the optimizer, the stream's position and the generator of noise and times, so a run that
was stopped and resumed gives the losses of one that was not. OUT then has the LoRA as `WanPipeline.load_lora_weights`
reads it.
"""

import argparse
from pathlib import Path

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from torch import Tensor
from torch.nn import functional as F

from encode_once import EncodeOnceError, JoinedCache, LatentStream, open_joined

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
SAVE_EVERY = 25

# Axes: N clips, C channels, T frames of a latent, Y X its cells.


def add_noise(clean_NCTYX: Tensor, shift: float, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return noisy latents, their times in [0, 1000], and the velocity to predict, noise - clean.

    As musubi-tuner trains Wan with `--timestep_sampling shift` (`get_noisy_model_input_and_timesteps` in its
    hv_train_network.py), but for the 1 that it adds to the times: diffusers' `WanPipeline` gives the model 1000 sigma.
    """
    noise_NCTYX = torch.randn(clean_NCTYX.shape, generator=random)
    sigma_N = torch.randn(len(clean_NCTYX), generator=random).sigmoid()
    sigma_N = shift * sigma_N / (1 + (shift - 1) * sigma_N)
    noisy_NCTYX = torch.lerp(clean_NCTYX, noise_NCTYX, sigma_N.view(-1, 1, 1, 1, 1))
    return noisy_NCTYX, 1000 * sigma_N, noise_NCTYX - clean_NCTYX


def refuse_other_caches(cache: JoinedCache, model: WanTransformer3DModel) -> None:
    """Raise EncodeOnceError unless the model takes these latents and texts."""
    latents, text = (each.spec.array for each in cache.caches.values())
    if "latent_t" not in latents.axes:
        raise EncodeOnceError("--latents: its samples are no clips; build it with clip.frames and clip.fps")
    wanted = {"channel": model.config.in_channels, "feature": model.config.text_dim}
    channels = latents.features // (2 if latents.encoder.posterior == "moments" else 1)
    found = {"channel": channels, "feature": text.features}
    if found != wanted:
        raise EncodeOnceError(f"the model takes {wanted}, the caches have {found}; use its own VAE and text encoder")
    for array in cache.caches["latents"].arrays:
        if any(side % patch for side, patch in zip(array.shape[1:], model.config.patch_size, strict=True)):
            raise EncodeOnceError(f"--latents: {array.shape} is not whole patches of {model.config.patch_size} cells")


def train(
    model: str, out: Path, latents: str, text: str, steps: int, batch_size: int, drop: float, shift: float, resume: bool
) -> None:
    if out.exists() and not resume:
        raise EncodeOnceError(f"{out} exists; add --resume to continue it")
    cache = open_joined({"latents": latents, "text": text})
    torch.manual_seed(0)
    wan = WanTransformer3DModel.from_pretrained(model, subfolder="transformer", torch_dtype=DTYPE).to(DEVICE)
    refuse_other_caches(cache, wan)
    stream = LatentStream(cache, batch_size, seed=0, epochs=None, normalize=True, caption_dropout=drop)
    wan.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=16, lora_alpha=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]), wan)
    wan.enable_gradient_checkpointing()
    wan.train()
    trained = [each for each in wan.parameters() if each.requires_grad]
    for each in trained:
        each.data = each.data.float()
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    done, random = 0, torch.Generator().manual_seed(0)
    if checkpoints := sorted(out.glob("step-*.pt")):
        state = torch.load(checkpoints[-1], weights_only=True)
        set_peft_model_state_dict(wan, state["lora"])
        optimizer.load_state_dict(state["optimizer"])
        stream.load_state_dict(state["stream"])
        random.set_state(state["random"])
        done = int(checkpoints[-1].stem.removeprefix("step-"))
    for step, batch in zip(range(done + 1, steps + 1), stream, strict=False):
        noisy_NCTYX, time_N, target_NCTYX = add_noise(batch["latents"]["latents"].float(), shift, random)
        texts = batch["latents"]["text"].to(DEVICE, DTYPE)  # zeros after the caption, as the model is trained on them
        with torch.autocast(DEVICE.type, DTYPE, enabled=torch.bfloat16 == DTYPE):
            velocity = wan(noisy_NCTYX.to(DEVICE, DTYPE), time_N.to(DEVICE), texts).sample
        loss = F.mse_loss(velocity.float(), target_NCTYX.to(DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.6f}  samples {batch['numbers'][:4].tolist()} …", flush=True)
        if step % SAVE_EVERY == 0 or step == steps:
            state = {"lora": get_peft_model_state_dict(wan), "optimizer": optimizer.state_dict()}
            out.mkdir(parents=True, exist_ok=True)
            torch.save({**state, "stream": stream.state_dict(), "random": random.get_state()}, out / "unfinished")
            (out / "unfinished").rename(out / f"step-{step:06d}.pt")
    WanPipeline.save_lora_weights(out, get_peft_model_state_dict(wan))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a LoRA of a Wan video model from caches.")
    parser.add_argument("model", metavar="MODEL", help="a pipeline's folder or hub id; its transformer is loaded")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for checkpoints; a new one, unless --resume")
    parser.add_argument("--latents", metavar="CACHE", required=True, help="a sealed cache of clips, by the model's VAE")
    parser.add_argument("--text", metavar="CACHE", required=True, help="the cache of their captions, by its UMT5")
    parser.add_argument("--steps", metavar="N", type=int, default=200, help="steps of the whole run (default: 200)")
    parser.add_argument("--batch-size", metavar="N", type=int, default=1, help="clips a step (default: 1)")
    parser.add_argument("--drop", metavar="SHARE", type=float, default=0.1, help="captions to drop (default: 0.1)")
    parser.add_argument("--shift", type=float, default=3.0, help="of times to noise: 3 at 480p, 5 at 720p (default: 3)")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in OUT, if any")
    try:
        train(**vars(parser.parse_args()))
    except (EncodeOnceError, OSError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
