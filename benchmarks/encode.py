"""Images per second of the folded encoder against diffusers' own encode: same weights, same images, one run.

Every side starts from uint8 pixels and ends with float32 latents. The peak to compare with is the faster of a square
matrix product and a 3x3 convolution of 384 channels on the same device, in the same run, since a CPU's matrix product
is not always its fastest kernel.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, get_args

from benchmarks.record import print_record
from benchmarks.timing import interleaved_seconds, rates, speedups, spread
from cache_store.program.command_line import Parser
from cache_store.program.run_program import run_program
from precompute.encoders.config import ComputeDtype

Seconds = Mapping[str, Sequence[float]]

DTYPES: tuple[ComputeDtype, ...] = get_args(ComputeDtype)
DUELS = (
    ("folded float32", "diffusers float32"),
    ("folded bfloat16", "diffusers bfloat16"),
    ("compiled bfloat16", "diffusers bfloat16"),
    ("folded bfloat16", "diffusers float32"),
)
"""Same dtype first, then our best against the dtype that diffusers loads in; only those that ran are reported."""
PACKAGES = ("torch", "diffusers", "encode-once")


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.encode", run, argv)


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    import torch  # it and diffusers take seconds to import: `--help` and wrong usage stay quick

    from benchmarks.encode_rivals import (
        encode_work,
        flop_of_one_image,
        load_rivals,
        model_of,
        peak_works,
        random_images,
    )

    with model_of(options) as model:
        encoders = load_rivals(model, options.device)
    images_NYX3 = random_images(options, encoders["folded float32"].device)
    works = {name: encode_work(encoder, images_NYX3) for name, encoder in encoders.items()}
    peaks, peak_flop = peak_works(images_NYX3.device)
    seconds = interleaved_seconds(works | peaks, options.repeats)
    flop_per_image = flop_of_one_image(encoders["folded float32"], images_NYX3)
    results = results_of(seconds, options.batch_size, flop_per_image, peak_flop)
    print_table(results)
    print_results(results, vars(options) | {"device": str(images_NYX3.device), "threads": torch.get_num_threads()})
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    parser.add_argument("--height", type=int, default=224)
    parser.add_argument("--width", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5, help="rounds measured after the first, which warms up")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--model", help="hub id or folder; random weights without it")
    parser.add_argument("--base-dim", type=int, default=96, help="width of the random model; 96 is the full size")
    return parser


@dataclass(frozen=True, kw_only=True)
class Results:
    """What the rounds gave; each mapping is by rival, as `folded float32`, and each list by round."""

    images_per_s: dict[str, list[float]]
    speedup: dict[str, list[float]]
    flop_per_image: int
    peak_flop_per_s: dict[str, float]
    """By dtype."""

    def flop_per_s(self, rival: str) -> float:
        """Useful operations: those of the folded network, whichever path computes them."""
        return median(self.images_per_s[rival]) * self.flop_per_image

    def peak_share(self, rival: str) -> float:
        return self.flop_per_s(rival) / self.peak_flop_per_s[rival.split()[1]]


def results_of(seconds: Seconds, batch_size: int, flop_per_image: int, peak_flop: Mapping[str, int]) -> Results:
    rivals = [name for name in seconds if name not in peak_flop]
    duels = [duel for duel in DUELS if duel[0] in rivals]
    return Results(
        images_per_s={name: rates(batch_size, seconds[name]) for name in rivals},
        speedup={f"{ours} over {baseline}": speedups(seconds[baseline], seconds[ours]) for ours, baseline in duels},
        flop_per_image=flop_per_image,
        peak_flop_per_s={dtype: peak_rate(dtype, seconds, peak_flop) for dtype in DTYPES},
    )


def peak_rate(dtype: ComputeDtype, seconds: Seconds, peak_flop: Mapping[str, int]) -> float:
    """The best that either kernel reached in any round."""
    return max(flop / min(seconds[name]) for name, flop in peak_flop.items() if name.endswith(dtype))


def print_table(results: Results) -> None:
    print(f"{'':<20}{'images/s':>10}{'range':>18}{'TFLOP/s':>10}{'of peak':>9}")
    for rival, speeds in results.images_per_s.items():
        share, tflop_per_s = results.peak_share(rival), results.flop_per_s(rival) / 1e12
        extent = f"{min(speeds):.2f}-{max(speeds):.2f}"
        print(f"{rival:<20}{median(speeds):>10.2f}{extent:>18}{tflop_per_s:>10.3f}{share:>9.0%}")
    for duel, factors in results.speedup.items():
        print(f"{duel:<46}{median(factors):>6.2f}x  ({min(factors):.2f}-{max(factors):.2f})")


def print_results(results: Results, settings: dict[str, Any]) -> None:
    print_record(
        "encode",
        PACKAGES,
        baseline="diffusers, its own AutoencoderKLWan.encode",
        settings=settings,
        images_per_s={rival: spread(speeds) for rival, speeds in results.images_per_s.items()},
        speedup={duel: spread(factors) for duel, factors in results.speedup.items()},
        gflop_per_image=round(results.flop_per_image / 1e9, 3),
        peak_gflop_per_s={dtype: round(peak / 1e9, 1) for dtype, peak in results.peak_flop_per_s.items()},
        peak_share={rival: round(results.peak_share(rival), 4) for rival in results.images_per_s},
    )


if __name__ == "__main__":
    sys.exit(main())
