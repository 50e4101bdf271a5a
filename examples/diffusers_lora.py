"""Train a LoRA of a diffusion transformer from a cache of latents of many sizes and the caches of its texts.

    python examples/diffusers_lora.py FLUX.1 OUT --latents CACHE --text t5=CACHE --text pooled=CACHE --steps 200
    python examples/diffusers_lora.py FLUX.1 OUT …the same… --resume                          # after any stop

Each batch has one size. Noise and time are drawn from the step's number, dropped captions from the stream's position,
so a run that was stopped and resumed gives the losses of one that was not. The transformer is small, with random
weights, of the class that the pipeline has, and no pipeline loads the checkpoints. For a real LoRA, put
`from_pretrained` in its place, move it and the batches to a GPU, and save the adapter as wan_lora.py does.
--text names caches as `precompute texts` does: t5 and pooled for FLUX.1; qwen for Qwen-Image; clip, clip-2 and pooled
for SDXL, whose latents need buckets.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMScheduler, FluxTransformer2DModel, QwenImageTransformer2DModel, UNet2DConditionModel
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from torch import Tensor
from torch.nn import functional as F

from encode_once import EncodeOnceError, LatentStream, open_joined, time_ids

FAMILIES = {"FLUX.1": ["t5", "pooled"], "Qwen-Image": ["qwen"], "SDXL": ["clip", "clip-2", "pooled"]}
SAVE_EVERY = 25
PLACED = ["width", "height", "crop_left", "crop_top"]
Texts = dict[str, Tensor]

# Axes: N samples, C channels, Y X cells of a latent, T tokens, F features.


def make_model(family: str, channels: int, widths: dict[str, int]) -> Any:
    """Make a small transformer, or U-Net, with random weights; `widths` are the texts' features, by name."""
    small: dict[str, Any] = {"attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (4, 6, 6)}
    if family == "FLUX.1":
        small |= {"joint_attention_dim": widths["t5"], "pooled_projection_dim": widths["pooled"]}
        return FluxTransformer2DModel(
            in_channels=4 * channels, num_layers=1, num_single_layers=1, guidance_embeds=True, **small
        )
    if family == "Qwen-Image":
        small |= {"out_channels": channels, "joint_attention_dim": widths["qwen"]}
        return QwenImageTransformer2DModel(in_channels=4 * channels, num_layers=1, **small)
    return UNet2DConditionModel(
        in_channels=channels,
        out_channels=channels,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(16, 32),
        norm_num_groups=8,
        attention_head_dim=(2, 4),
        cross_attention_dim=widths["clip"] + widths["clip-2"],
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + widths["pooled"],
    )


def predict(model: Any, noisy_NCYX: Tensor, time_N: Tensor, texts: Texts, mask: Texts, ids_N6: Tensor | None) -> Any:
    """Call the model as its pipeline does; FLUX.1 and Qwen-Image take a token of each 2 x 2 cells."""
    rows, columns = (side // 2 for side in noisy_NCYX.shape[2:])
    tokens_NTF = F.pixel_unshuffle(noisy_NCYX, 2).flatten(2).transpose(1, 2)
    if isinstance(model, FluxTransformer2DModel):
        of = {"encoder_hidden_states": texts["t5"], "pooled_projections": texts["pooled"]}
        if model.config.guidance_embeds:
            of["guidance"] = torch.ones_like(time_N)  # as diffusers' scripts train FLUX.1 dev
        image_ids = F.pad(torch.cartesian_prod(torch.arange(rows), torch.arange(columns)), (1, 0)).to(noisy_NCYX)
        text_ids = image_ids.new_zeros(texts["t5"].shape[1], 3)
        out_NTF = model(tokens_NTF, timestep=time_N, img_ids=image_ids, txt_ids=text_ids, **of).sample
    elif isinstance(model, QwenImageTransformer2DModel):
        of = {"encoder_hidden_states": texts["qwen"], "encoder_hidden_states_mask": mask["qwen"]}
        out_NTF = model(tokens_NTF, timestep=time_N, img_shapes=[[(1, rows, columns)]] * len(noisy_NCYX), **of).sample
    else:
        states_NTF = torch.cat([texts["clip"], texts["clip-2"]], -1)
        added = {"text_embeds": texts["pooled"], "time_ids": ids_N6}
        return model(noisy_NCYX, time_N, encoder_hidden_states=states_NTF, added_cond_kwargs=added).sample
    return F.pixel_shuffle(out_NTF.transpose(1, 2).unflatten(2, (rows, columns)), 2)


def add_noise(family: str, clean_NCYX: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return noisy latents, their times, and what to predict: by DDPM for SDXL, else by a rectified flow."""
    noise_NCYX = torch.randn(clean_NCYX.shape, generator=random)
    if family == "SDXL":
        scheduler = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
        time_N = torch.randint(scheduler.config.num_train_timesteps, (len(clean_NCYX),), generator=random)
        return scheduler.add_noise(clean_NCYX, noise_NCYX, time_N), time_N, noise_NCYX
    sigma_N = torch.randn(len(clean_NCYX), generator=random).sigmoid()
    return torch.lerp(clean_NCYX, noise_NCYX, sigma_N.view(-1, 1, 1, 1)), sigma_N, noise_NCYX - clean_NCYX


def train(
    family: str, out: Path, latents: str, text: list[str], steps: int, batch_size: int, drop: float, resume: bool
) -> None:
    torch.manual_seed(0)
    names = [each.partition("=")[0] for each in text]
    if sorted(names) != sorted(FAMILIES[family]) or not all("=" in each for each in text):
        raise EncodeOnceError(f"--text NAME=CACHE: {family} needs {', '.join(FAMILIES[family])}; got {', '.join(text)}")
    cache = open_joined({"latents": latents, **dict(each.split("=", 1) for each in text)})
    stream = LatentStream(cache, batch_size, seed=0, epochs=None, normalize=True, caption_dropout=drop)
    widths = {name: each.arrays[0].shape[-1] for name, each in cache.caches.items()}
    channels = stream.batch(0)["latents"]["latents"].shape[1]  # half of those in a cache of moments
    model = make_model(family, channels, widths)
    model.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"]), model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    if out.exists() and not resume:
        raise EncodeOnceError(f"{out} exists; add --resume to continue it")
    done, ids_N6 = 0, None
    if checkpoints := sorted(out.glob("step-*.pt")) if resume else []:
        state = torch.load(checkpoints[-1], weights_only=True)
        set_peft_model_state_dict(model, state["lora"])
        optimizer.load_state_dict(state["optimizer"])
        stream.load_state_dict(state["stream"])
        done = int(checkpoints[-1].stem.removeprefix("step-"))
    for step, batch in zip(range(done + 1, steps + 1), stream, strict=False):
        random = torch.Generator().manual_seed(step)
        clean_NCYX, *_ = (texts := {name: each.float() for name, each in batch["latents"].items()}).values()
        del texts["latents"]
        noisy_NCYX, time_N, target_NCYX = add_noise(family, clean_NCYX, random)
        if family == "SDXL":
            size = [8 * side for side in clean_NCYX.shape[2:]]
            ids_N6 = torch.from_numpy(time_ids(cache.samples(batch["numbers"].numpy(), PLACED), size))
        loss = F.mse_loss(predict(model, noisy_NCYX, time_N, texts, batch["mask"], ids_N6), target_NCYX)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.6f}  samples {batch['numbers'][:4].tolist()} …", flush=True)
        if step % SAVE_EVERY == 0 or step == steps:
            state = {"lora": get_peft_model_state_dict(model), "optimizer": optimizer.state_dict()}
            out.mkdir(parents=True, exist_ok=True)
            torch.save({**state, "stream": stream.state_dict()}, out / "unfinished")
            (out / "unfinished").rename(out / f"step-{step:06d}.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a LoRA of a small diffusion model from caches.")
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for checkpoints; a new one, unless --resume")
    parser.add_argument("--latents", metavar="CACHE", required=True, help="a sealed cache of a VAE's latents")
    parser.add_argument("--text", metavar="NAME=CACHE", action="append", required=True, help="a cache of its texts")
    parser.add_argument("--steps", metavar="N", type=int, default=200, help="steps of the whole run (default: 200)")
    parser.add_argument("--batch-size", metavar="N", type=int, default=4, help="samples a step (default: 4)")
    parser.add_argument("--drop", metavar="SHARE", type=float, default=0.1, help="captions to drop (default: 0.1)")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in OUT, if any")
    try:
        train(**vars(parser.parse_args()))
    except (EncodeOnceError, OSError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
