"""Measure images per second of the folded encoder against diffusers' own encode: same weights, same images, one run.

Every side starts from uint8 pixels and ends with float32 latents. The peak is the faster of a square matrix product and
a 3x3 convolution of 384 channels on the same device in the same run, since a CPU's matrix product is not always its
fastest kernel.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import get_args

from benchmarks.options import parser_with
from benchmarks.record import print_record
from benchmarks.timing import interleaved_seconds, rates, speedups, spread
from cache_store.program.running import run_program
from precompute.encoders.config import ComputeDtype

DTYPES: tuple[ComputeDtype, ...] = get_args(ComputeDtype)
DUELS = (
    ("folded float32", "diffusers float32"),
    ("folded bfloat16", "diffusers bfloat16"),
    ("compiled bfloat16", "diffusers bfloat16"),
    ("compiled bfloat16", "diffusers-compiled bfloat16"),
    ("replayed bfloat16", "diffusers bfloat16"),
    ("replayed bfloat16", "diffusers-compiled bfloat16"),
    ("folded bfloat16", "diffusers float32"),
)
"""Pairs of one dtype first, then our best against the dtype that diffusers loads; only pairs that ran are reported."""
PACKAGES = ("torch", "diffusers", "encode-once")


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.encode", run, argv)


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    import torch  # torch and diffusers take seconds to import: `--help` and wrong usage stay quick

    from benchmarks import encode_rivals as rivals

    with rivals.model_of(options) as model:
        encoders = rivals.load_rivals(model, options.device)
    folded = encoders["folded float32"]
    images_NYX3 = rivals.random_images(options, folded.device)
    encodings: dict[str, Callable[[], torch.Tensor]] = {
        name: partial(encoder.encode, images_NYX3) for name, encoder in encoders.items()
    }
    if folded.device.type == "cuda":
        encodings["replayed bfloat16"] = rivals.replayed(encoders["compiled bfloat16"], images_NYX3)
    works = {name: partial(rivals.run_to_end, encode, folded.device) for name, encode in encodings.items()}
    peaks, peak_flop = rivals.peak_works(folded.device)
    seconds = interleaved_seconds(works | peaks, options.repeats)
    flop_per_image = rivals.flop_of_one_image(folded, images_NYX3)
    speeds = {name: rates(options.batch_size, seconds[name]) for name in works}
    duels = {f"{ours} over {theirs}": (seconds[theirs], seconds[ours]) for ours, theirs in DUELS if ours in works}
    gains = {duel: speedups(*both) for duel, both in duels.items()}
    # Only the folded network's operations count as useful, whichever path computes them.
    flop_per_s = {name: median(each) * flop_per_image for name, each in speeds.items()}
    peak: dict[str, float] = {dtype: peak_rate(dtype, seconds, peak_flop) for dtype in DTYPES}
    shares = {name: each / peak[name.split()[1]] for name, each in flop_per_s.items()}
    print_table(speeds, flop_per_s, shares, gains)
    print_record(
        "encode",
        PACKAGES,
        baseline="diffusers, its own AutoencoderKLWan.encode",
        settings=vars(options) | {"device": str(folded.device), "threads": torch.get_num_threads()},
        images_per_s={rival: spread(each) for rival, each in speeds.items()},
        speedup={duel: spread(each) for duel, each in gains.items()},
        gflop_per_image=round(flop_per_image / 1e9, 3),
        peak_gflop_per_s={dtype: round(each / 1e9, 1) for dtype, each in peak.items()},
        peak_share={rival: round(share, 4) for rival, share in shares.items()},
    )
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = parser_with(__doc__, "height", "width", "repeats", batch_size=4)
    parser.add_argument("--model", help="hub id or folder; random weights without it")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--base-dim", type=int, default=96, help="width of the random model; 96 is the full size")
    return parser


def peak_rate(dtype: ComputeDtype, seconds: Mapping[str, Sequence[float]], peak_flop: Mapping[str, int]) -> float:
    """Return the highest rate that either kernel reached in any round."""
    return max(flop / min(seconds[name]) for name, flop in peak_flop.items() if name.endswith(dtype))


def print_table(
    speeds: Mapping[str, list[float]],
    flop_per_s: Mapping[str, float],
    shares: Mapping[str, float],
    gains: Mapping[str, list[float]],
) -> None:
    print(f"{'':<30}{'images/s':>10}{'range':>18}{'TFLOP/s':>10}{'of peak':>9}")
    for rival, each in speeds.items():
        extent = f"{min(each):.2f}-{max(each):.2f}"
        print(f"{rival:<30}{median(each):>10.2f}{extent:>18}{flop_per_s[rival] / 1e12:>10.3f}{shares[rival]:>9.0%}")
    for duel, factors in gains.items():
        print(f"{duel:<58}{median(factors):>6.2f}x  ({min(factors):.2f}-{max(factors):.2f})")


if __name__ == "__main__":
    sys.exit(main())
