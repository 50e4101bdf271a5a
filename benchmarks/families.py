"""Measure images per second of every family of encoders against its own library, at full size, with random weights.

Both sides start from the same uint8 pixels, end with float32 samples on the CPU or GPU, and take turns. Families are
measured one after another.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.options import parser_with
from benchmarks.record import print_record
from benchmarks.timing import interleaved_seconds, rates, speedups, spread
from cache_store.program.running import run_program

PACKAGES = ("torch", "diffusers", "transformers", "encode-once")
MINIMAL_DECODER = {"decoder_base_dim": 8}
DC = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Wan 2.1, Qwen-Image": ("AutoencoderKLWan", MINIMAL_DECODER),
    "Wan 2.2, Cosmos 3": (
        "AutoencoderKLWan",
        {
            **MINIMAL_DECODER,
            "base_dim": 160,
            "z_dim": 48,
            "is_residual": True,
            "patch_size": 2,
            "in_channels": 12,
            "out_channels": 12,
            "latents_mean": [0.0] * 48,
            "latents_std": [1.0] * 48,
        },
    ),
    "Qwen-Image 2.1": ("AutoencoderKLQwenImage21", {}),
    "Cosmos 1.0": ("AutoencoderKLCosmos", {}),
    "SDXL, FLUX.1": (
        "AutoencoderKL",
        {
            "block_out_channels": (128, 256, 512, 512),
            "layers_per_block": 2,
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
        },
    ),
    "FLUX.2": ("AutoencoderKLFlux2", {}),
    "DC-AE of SANA": (
        "AutoencoderDC",
        {
            "encoder_block_types": DC,
            "decoder_block_types": DC,
            "encoder_layers_per_block": (2, 2, 2, 3, 3, 3),
            "decoder_layers_per_block": (1,) * 6,
            "encoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
            "decoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
            "downsample_block_type": "Conv",
        },
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
}
"""Class and config of the full-size encoder, by the models that have it; decoders are small if possible."""


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.families", run, argv)


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    import torch  # torch and the libraries take seconds to import: `--help` and wrong usage stay quick

    seconds = {name: measured(folder, options) for name, folder in models_of(options)}
    speeds = {
        name: {side: rates(options.batch_size, each) for side, each in sides.items()} for name, sides in seconds.items()
    }
    gains = {name: speedups(sides["library"], sides["here"]) for name, sides in seconds.items()}
    print_table(speeds, gains)
    print_record(
        "families",
        PACKAGES,
        baseline="the library's own encode, with the same weights",
        settings=vars(options) | {"threads": torch.get_num_threads()},
        images_per_s={name: {side: spread(each) for side, each in sides.items()} for name, sides in speeds.items()},
        speedup={name: spread(each) for name, each in gains.items()},
    )
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = parser_with(__doc__, "height", "width", repeats=3, batch_size=1)
    parser.add_argument("--model", nargs="+", help="folders with encoders, in place of random ones of full size")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="NAME")
    parser.add_argument("--device", default="cpu", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--compute-dtype", default="float32", choices=("float32", "bfloat16"))
    return parser


def models_of(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield name and folder of each model; a random one is deleted when the next is taken."""
    if options.model:
        yield from ((Path(folder).name, folder) for folder in options.model)
        return
    for name in options.families:
        with random_model(name) as folder:
            yield name, folder


@contextmanager
def random_model(name: str) -> Iterator[str]:
    import torch

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        make(name).save_pretrained(folder)
        yield folder


def make(name: str) -> Any:
    """Make the library's model with random weights."""
    import diffusers
    import transformers

    class_name, config = FAMILIES[name]
    if class_name.startswith("Autoencoder"):
        return getattr(diffusers, class_name)(**config)
    model_class = getattr(transformers, class_name)
    return model_class(model_class.config_class(**config))


def measured(folder: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of every round, by our encoder and by the library."""
    import torch

    from benchmarks.encode_rivals import run_to_end
    from precompute.encoders.config import EncoderConfig
    from precompute.encoders.registry import load_encoder

    config = EncoderConfig(model=folder, device=options.device, compute_dtype=options.compute_dtype)
    encoder = load_encoder(config, "signed")
    shape = (options.batch_size, options.height, options.width, 3)
    images_NYX3 = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    by_library = library_encode(folder, encoder.device, config.torch_dtype)
    works = {
        "library": partial(run_to_end, partial(by_library, images_NYX3), encoder.device),
        "here": partial(run_to_end, partial(encoder.encode, images_NYX3), encoder.device),
    }
    return interleaved_seconds(works, options.repeats)


def library_encode(folder: str, device: Any, dtype: Any) -> Callable[[Any], Any]:
    """Encode as the library's users do: from uint8 pixels to float32 latents or hidden states."""
    import diffusers
    import torch
    import transformers

    config: Mapping[str, Any] = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    is_vae = "_class_name" in config
    library, class_name = (diffusers, config["_class_name"]) if is_vae else (transformers, *config["architectures"])
    model_class = getattr(library, class_name)
    stated = {"torch_dtype" if is_vae else "dtype": dtype}
    model = model_class.from_pretrained(folder, **stated).to(device).eval()
    if is_vae:
        model.decoder = torch.nn.Module()
    is_video = any(isinstance(each, torch.nn.Conv3d) for each in model.modules()) or "Qwen" in model_class.__name__

    def encode(images_NYX3: torch.Tensor) -> torch.Tensor:
        pixels = (images_NYX3.to(device).permute(0, 3, 1, 2).float() / 127.5 - 1).to(dtype).contiguous()
        if not is_vae:
            return model(pixel_values=pixels).last_hidden_state.float()  # type: ignore[no-any-return]
        if model.config.get("in_channels") == 4:
            pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], 1)
        (encoded,) = model.encode(pixels.unsqueeze(2) if is_video else pixels, return_dict=False)
        return encoded.float() if isinstance(encoded, torch.Tensor) else encoded.parameters.float()

    return encode


def print_table(speeds: Mapping[str, Mapping[str, list[float]]], gains: Mapping[str, list[float]]) -> None:
    print(f"{'images/s':<24}{'here':>10}{'range':>16}{'library':>10}{'range':>16}{'ratio':>8}")
    for name, sides in speeds.items():
        shown = "".join(
            f"{median(sides[side]):>10.2f}{f'{min(sides[side]):.2f}-{max(sides[side]):.2f}':>16}"
            for side in ("here", "library")
        )
        print(f"{name:<24}{shown}{median(gains[name]):>7.2f}x")


if __name__ == "__main__":
    sys.exit(main())
