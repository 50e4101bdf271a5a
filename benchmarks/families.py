"""Measure images per second of every family of encoders against its own library, at full size, with random weights.

Both sides start from the same uint8 pixels, end with float32 samples on the CPU or GPU, and take turns. Families are
measured one after another.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor

from benchmarks.encode import random_images, run_to_end
from benchmarks.harness import Seconds, parser_with, program, rates, ratios, report, take_turns
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.registry import load_encoder
from precompute.images.config import ImageConfig

# Axes: N images, Y X pixels, 3 RGB.

PACKAGES = ("torch", "diffusers", "transformers", "encode-once")
DC = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Wan 2.1, Qwen-Image": ("AutoencoderKLWan", {"decoder_base_dim": 8}),
    "Wan 2.2, Cosmos 3": (
        "AutoencoderKLWan",
        {"decoder_base_dim": 8, "base_dim": 160, "z_dim": 48, "is_residual": True, "patch_size": 2, "in_channels": 12,
         "out_channels": 12, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48},
    ),
    "Qwen-Image 2.1": ("AutoencoderKLQwenImage21", {}),
    "Cosmos 1.0": ("AutoencoderKLCosmos", {}),
    "SDXL, FLUX.1": (
        "AutoencoderKL",
        {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2,
         "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4},
    ),
    "FLUX.2": ("AutoencoderKLFlux2", {}),
    "DC-AE of SANA": (
        "AutoencoderDC",
        {"encoder_block_types": DC, "decoder_block_types": DC, "encoder_layers_per_block": (2, 2, 2, 3, 3, 3),
         "decoder_layers_per_block": (1,) * 6, "encoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
         "decoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)), "downsample_block_type": "Conv"},
    ),
    "TAESD": ("AutoencoderTiny", {}),
    "HunyuanVideo": ("AutoencoderKLHunyuanVideo", {}),
    "LTX": ("AutoencoderKLLTXVideo", {}),
    "LTX 2": ("AutoencoderKLLTX2Video", {"decoder_block_out_channels": (8, 16, 32)}),
    "Mochi": ("AutoencoderKLMochi", {}),
    "CogVideoX": ("AutoencoderKLCogVideoX", {}),
    "CLIP L/14": ("CLIPVisionModel", {**LARGE, "patch_size": 14}),
    "SigLIP B/16": ("SiglipVisionModel", {}),
    "DINOv2 L/14": ("Dinov2Model", {**LARGE, "image_size": 224, "patch_size": 14}),
    "DINOv3 L/16": ("DINOv3ViTModel", LARGE),
}  # fmt: skip
"""Class and config of the full-size encoder, by the models that have it; decoders are small if possible."""


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    speeds, over = dict[str, list[float]](), dict[str, list[float]]()
    for name, folder in models_of(options):
        measured = {side: rates(options.batch_size, each) for side, each in measure(folder, options).items()}
        speeds |= {f"{name}, {side}": each for side, each in measured.items()}
        over[name] = ratios(measured["here"], measured["library"])
    report(options, PACKAGES, "images_per_s", speeds, over, threads=torch.get_num_threads())
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = parser_with(__doc__, "height", "width", repeats=3, batch_size=1, device="cpu", compute_dtype="float32")
    parser.add_argument("--model", nargs="+", help="folders with encoders, in place of random ones of full size")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="NAME")
    return parser


def models_of(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield name and folder of each model; a random one is deleted when the next is taken."""
    if options.model:
        yield from ((Path(folder).name, folder) for folder in options.model)
        return
    for name in options.families:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            make(name).save_pretrained(folder)
            yield name, folder


def make(name: str) -> Any:
    """Make the library's model with random weights."""
    class_name, config = FAMILIES[name]
    if class_name.startswith("Autoencoder"):
        return getattr(diffusers, class_name)(**config)
    model_class = getattr(transformers, class_name)
    return model_class(model_class.config_class(**config))


def measure(folder: str, options: argparse.Namespace) -> Seconds:
    """Return the seconds of every round, by our encoder and by the library."""
    config = EncoderConfig(model=folder, device=options.device, compute_dtype=options.compute_dtype)
    encoder = load_encoder(config, ImageConfig().recipe)
    images_NTYX3 = random_images(options, torch.device("cpu"))
    sides = {"library": library_encode(folder, encoder.device, config.torch_dtype), "here": encoder.encode}
    works = {name: partial(run_to_end, partial(side, images_NTYX3), encoder.device) for name, side in sides.items()}
    return take_turns(works, options.repeats)


def library_encode(folder: str, device: torch.device, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Encode as the library's users do: from uint8 pixels to float32 latents or hidden states."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    is_vae = "_class_name" in config
    library, class_name = (diffusers, config["_class_name"]) if is_vae else (transformers, *config["architectures"])
    stated = {"torch_dtype" if is_vae else "dtype": dtype}
    model: Any = getattr(library, class_name).from_pretrained(folder, **stated).to(device).eval()
    if is_vae:
        model.decoder = torch.nn.Module()
    is_video = any(isinstance(each, torch.nn.Conv3d) for each in model.modules()) or "Qwen" in class_name

    def encode(images_NTYX3: Tensor) -> Tensor:
        pixels = (images_NTYX3[:, 0].to(device).permute(0, 3, 1, 2).float() / 127.5 - 1).to(dtype).contiguous()
        if not is_vae:
            return model(pixel_values=pixels).last_hidden_state.float()  # type: ignore[no-any-return]
        if model.config.get("in_channels") == 4:
            pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], 1)
        (encoded,) = model.encode(pixels.unsqueeze(2) if is_video else pixels, return_dict=False)
        return encoded.float() if isinstance(encoded, Tensor) else encoded.parameters.float()

    return encode


main = program(run)

if __name__ == "__main__":
    sys.exit(main())
