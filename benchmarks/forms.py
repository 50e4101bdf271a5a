"""Compare forms in which latents may be stored: what rounding changes, and what codecs save and cost.

Rounding is compared with float32 values: the latents times a factor that moves them off the grid of float16. Two forms
that a store does not offer are measured too: float8, and uint8 with one scale per channel for all latents. Codecs write
and read float16, a latent at a time, in one thread; codes of uint8 are read as float32 likewise.

With --encoder and --images in place of --latents, it measures how rounding changes decoded pictures, for a VAE or an
encoder of your own that has `decode`. PSNR compares float pictures with the one decoded from float32, and the source.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from benchmarks.harness import parser_with, print_record, program, rates, spread, take_turns
from benchmarks.photographs import SUFFIXES
from cache_store.errors import ConfigError
from cache_store.format.array import CodecName, StoreDtype
from cache_store.format.codec import decode_sample, encode_sample
from cache_store.format.quantized import as_read, dequantize, quantize

PACKAGES = ("numpy", "ml_dtypes", "numcodecs", "encode-once")
OFF_GRID = np.float32(1.2345678)

EQUAL = 200.0
"""PSNR of equal pictures, in dB."""

# Axes: N latents, C channels, Y X cells.
Latents = NDArray[np.float32]


def cast(dtype: type) -> Callable[[Latents], Latents]:
    return lambda latents_NCYX: latents_NCYX.astype(dtype).astype(np.float32)


def uint8_by_channel(latents_NCYX: Latents) -> Latents:
    """Round with one scale for each channel of all latents."""
    channels_1CNYX = np.ascontiguousarray(latents_NCYX.swapaxes(0, 1)[None])
    read_NCYX: Latents = as_read(channels_1CNYX, "uint8")[0].swapaxes(0, 1)
    return read_NCYX


UINT8 = "uint8, a scale a latent and channel"

FORMS: dict[str, tuple[int, Callable[[Latents], Latents]]] = {
    "float16": (2, partial(as_read, dtype="float16")),
    "bfloat16": (2, partial(as_read, dtype="bfloat16")),
    UINT8: (1, partial(as_read, dtype="uint8")),
    "uint8, a scale a channel": (1, uint8_by_channel),
    "float8_e4m3fn": (1, cast(ml_dtypes.float8_e4m3fn)),
    "float8_e5m2": (1, cast(ml_dtypes.float8_e5m2)),
}
"""By name: bytes a value, and what is read back."""


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    if (options.encoder is None) == (options.latents is None) or (options.encoder is None) != (options.images is None):
        raise ConfigError("give --latents FILE, or --encoder MODEL and --images FOLDER")
    return compare_latents(options) if options.encoder is None else compare_pictures(options)


def compare_pictures(options: argparse.Namespace) -> int:
    import torch

    from precompute.encoders.encoder_config import EncoderConfig
    from precompute.encoders.registry import load_decoder, load_encoder
    from precompute.images.config import ImageConfig

    exact, coarse = (
        load_encoder(EncoderConfig(model=options.encoder, device="cpu", compute_dtype=dtype), ImageConfig().recipe)
        for dtype in ("float32", "bfloat16")
    )
    decode, _ = load_decoder(EncoderConfig(model=options.encoder, device="cpu"))
    forms = {name: stored for name, (_, stored) in FORMS.items() if name in get_args(StoreDtype) or name == UINT8}
    figures: dict[str, dict[str, list[float]]] = {}
    for image_YX3 in pictures_in(Path(options.images), options):
        image_11YX3 = torch.from_numpy(image_YX3)[None, None]
        latent_1CYX = exact.encode(image_11YX3).numpy()
        computed = {"computed in bfloat16, float16": as_read(coarse.encode(image_11YX3).numpy(), "float16")}
        stored = {"float32": latent_1CYX, **{name: each(latent_1CYX) for name, each in forms.items()}, **computed}
        with torch.inference_mode():
            shown = {
                name: decode(torch.from_numpy(each.astype(np.float32))).clamp(-1, 1).numpy()
                for name, each in stored.items()
            }
        source_13YX = image_YX3.transpose(2, 0, 1)[None].astype(np.float32) / 127.5 - 1
        for name, picture in shown.items():
            found = {
                "error, % of rms": 100 * rms(stored[name] - latent_1CYX) / rms(latent_1CYX),
                "dB to float32": psnr(picture, shown["float32"]),
                "dB to the source": psnr(picture, source_13YX),
            }
            for key, value in found.items():
                figures.setdefault(name, {}).setdefault(key, []).append(value)
    pictures = {name: {key: spread(values) for key, values in each.items()} for name, each in figures.items()}
    for name, each in pictures.items():
        columns = (f"{key} {of['median']:.4g} ({of['min']:.4g}–{of['max']:.4g})" for key, of in each.items())
        print(f"{name:<36} {', '.join(columns)}")
    count = len(figures["float32"]["dB to float32"])
    print_record(options, (*PACKAGES, "torch", "pillow"), images=count, pictures=pictures)
    return 0


def rms(values: NDArray[np.floating]) -> float:
    return float(np.sqrt(np.mean(values.astype(np.float64) ** 2)))


def psnr(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return the peak signal-to-noise ratio of pictures in [-1, 1], in dB; at most EQUAL."""
    apart = rms(one - other)
    return min(EQUAL, 20 * float(np.log10(2 / apart))) if apart else EQUAL


def pictures_in(folder: Path, options: argparse.Namespace) -> Iterator[NDArray[np.uint8]]:
    """Open the first --count pictures of a folder, by name, cropped at the centre to --height and --width."""
    paths = sorted(path for path in folder.glob("*") if path.suffix.lower() in (*SUFFIXES, ".png"))[: options.count]
    if not paths:
        raise ConfigError(f"--images {folder} holds no JPEG or PNG")
    for path in paths:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
        yield np.array(ImageOps.fit(upright, (options.width, options.height), Image.Resampling.LANCZOS))


def compare_latents(options: argparse.Namespace) -> int:
    latents_NCYX = load(options.latents)
    exact_NCYX = latents_NCYX.astype(np.float32) * OFF_GRID
    whole, rounding = float(np.sqrt(np.mean(exact_NCYX**2))), dict[str, float]()
    for name, (size, stored) in FORMS.items():
        error = np.sqrt(np.mean((stored(exact_NCYX) - exact_NCYX) ** 2, dtype=np.float64))
        rounding[name] = float(f"{error / whole:.3g}")
        print(f"{name:<36} {size} bytes a value, error {error / whole:.3%} of rms")
    halves = [np.ascontiguousarray(each) for each in latents_NCYX.astype(np.float16)]
    results, raw = dict[str, dict[str, object]](), sum(each.nbytes for each in halves)
    payloads = {codec: [encode_sample(each, codec) for each in halves] for codec in get_args(CodecName)}
    target = np.empty(halves[0].nbytes, np.uint8)
    codes = [quantize(each[None]) for each in exact_NCYX]
    values = np.empty_like(exact_NCYX[:1])

    def write(codec: CodecName) -> None:
        for each in halves:
            encode_sample(each, codec)

    def read(codec: CodecName) -> None:
        for each in payloads[codec]:
            decode_sample(memoryview(each), codec, target)

    def read_codes() -> None:
        for each in codes:
            dequantize(*each, values)

    written = take_turns({codec: partial(write, codec) for codec in payloads}, options.repeats)
    seconds = take_turns({**{codec: partial(read, codec) for codec in payloads}, "uint8": read_codes}, options.repeats)
    for codec, each in payloads.items():
        share = sum(map(len, each)) / raw
        speeds = {
            step: spread(rates(len(halves), taken[codec])) for step, taken in (("write", written), ("read", seconds))
        }
        results[codec] = {"size": round(share, 4), **speeds}
        shown = ", ".join(f"{step} {figures['median']:,.0f}/s" for step, figures in speeds.items())
        print(f"{codec:<8} {share:.3f} of the bytes, {shown}")
    from_codes = spread(rates(len(halves), seconds["uint8"]))
    print(f"uint8    codes to float32 {from_codes['median']:,.0f}/s")
    record = {"rounding": rounding, "codecs": results, "codes_to_float32": from_codes}
    print_record(options, PACKAGES, latents=list(latents_NCYX.shape), **record)
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = parser_with(__doc__, "repeats", "images", count=32, height=512, width=512)
    parser.add_argument("--latents", metavar="FILE", help="a .npy file of latents, [N, C, Y, X]")
    parser.add_argument("--encoder", metavar="MODEL", help="a VAE: hub id, folder, or my_module:MyClass with `decode`")
    return parser


def load(file: str) -> NDArray[np.floating]:
    try:
        latents: NDArray[np.floating] = np.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--latents {file}: {error}") from None
    if latents.ndim != 4 or latents.dtype.kind != "f":
        raise ConfigError(f"--latents {file} holds {latents.dtype} {list(latents.shape)}; expected floats [N, C, Y, X]")
    return latents


main = program(run)

if __name__ == "__main__":
    sys.exit(main())
