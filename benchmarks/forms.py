"""Compare forms in which latents may be stored: what rounding changes, and what codecs save and cost.

Rounding is compared with float32 values: the latents times a factor that moves them off the grid of float16. uint8 is
also compared with one scale for each channel of all latents; that and float8 are measured, and not offered. Codecs
write and read float16, a latent at a time, in one thread; codes of uint8 are read as float32 likewise.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import parser_with, print_record, program, rates, spread, take_turns
from cache_store.errors import ConfigError
from cache_store.format.array import CodecName
from cache_store.format.codec import decode_sample, encode_sample
from cache_store.format.quantized import as_read, dequantize, quantize

PACKAGES = ("numpy", "ml_dtypes", "numcodecs", "encode-once")
OFF_GRID = np.float32(1.2345678)

# Axes: N latents, C channels, Y X cells.
Latents = NDArray[np.float32]


def cast(dtype: type) -> Callable[[Latents], Latents]:
    return lambda latents_NCYX: latents_NCYX.astype(dtype).astype(np.float32)


def uint8_by_channel(latents_NCYX: Latents) -> Latents:
    """Round with one scale for each channel of all latents."""
    channels_1CNYX = np.ascontiguousarray(latents_NCYX.swapaxes(0, 1)[None])
    read_NCYX: Latents = as_read(channels_1CNYX, "uint8")[0].swapaxes(0, 1)
    return read_NCYX


FORMS: dict[str, tuple[int, Callable[[Latents], Latents]]] = {
    "float16": (2, partial(as_read, dtype="float16")),
    "bfloat16": (2, partial(as_read, dtype="bfloat16")),
    "uint8, a scale a latent and channel": (1, partial(as_read, dtype="uint8")),
    "uint8, a scale a channel": (1, uint8_by_channel),
    "float8_e4m3fn": (1, cast(ml_dtypes.float8_e4m3fn)),
    "float8_e5m2": (1, cast(ml_dtypes.float8_e5m2)),
}
"""By name: bytes a value, and what is read back."""


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    latents_NCYX = load(options.latents)
    exact_NCYX = latents_NCYX.astype(np.float32) * OFF_GRID
    rms, rounding = float(np.sqrt(np.mean(exact_NCYX**2))), dict[str, float]()
    for name, (size, stored) in FORMS.items():
        error = np.sqrt(np.mean((stored(exact_NCYX) - exact_NCYX) ** 2, dtype=np.float64))
        rounding[name] = float(f"{error / rms:.3g}")
        print(f"{name:<36} {size} bytes a value, error {error / rms:.3%} of rms")
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
    parser = parser_with(__doc__, "repeats")
    parser.add_argument("--latents", metavar="FILE", required=True, help="a .npy file of latents, [N, C, Y, X]")
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
