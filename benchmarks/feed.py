"""Measure images per second of a whole build around an encoder that only sleeps, and of others' pipelines in its place.

Pipeline and writer are a build's; the encoder takes `--encoder-ms` a batch and no core, and serves one worker at a
time. Time counts from the first image read, with all encoders loaded, to the last shard committed. In the same run a
torch DataLoader with np.save a batch, SPDL, Ray Data and Daft feed the same stand-in (extras of `bench`; one that is
not installed is named). CPU time by part is measured in a separate run.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.decode import jpegs_of
from benchmarks.options import parser_with, positive_int
from benchmarks.record import print_record
from benchmarks.timing import rates, spread
from cache_store.program.command_line import parse_config
from cache_store.program.running import run_program

PACKAGES = ("torch", "numpy", "pillow", "spdl", "ray", "daft", "encode-once")
PARTS_SAMPLES = 2_048
"""Most rows of the run that measures CPU time by part."""
OURS, ENCODER, DECODING = "build", "encoder alone", "decoding alone"


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.feed", run, argv)


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    from benchmarks.feed_parts import Feed  # imports torch: `--help` and wrong usage stay quick
    from benchmarks.feed_peers import PEERS, reason_to_skip
    from benchmarks.feed_stand_in import restore_decoder

    with tempfile.TemporaryDirectory(prefix="feed-", dir=options.folder) as name, ExitStack() as ends:
        ends.callback(restore_decoder)
        feed = Feed(config_of(Path(name), options), options.encoder_ms, is_stubbed=options.decode == "stub")
        works: dict[str, Callable[[], float]] = {OURS: feed.build, ENCODER: feed.encoder_alone}
        if options.decode == "real":
            works[DECODING] = feed.decoding_alone
        skipped = {}
        for peer in options.peers:
            if problem := reason_to_skip(peer, feed):
                skipped[peer] = problem
            else:
                works[peer] = partial(PEERS[peer], feed)
        seconds: dict[str, list[float]] = {work: [] for work in works}
        for _ in range(options.repeats):
            for work, each in works.items():
                seconds[work].append(each())
        parts = feed.cpu_us_of_parts(min(PARTS_SAMPLES, options.samples))
        measured = summary(options, seconds, parts) | {"workers": feed.workers, "skipped": skipped}
    print_table(measured)
    print_record("feed", PACKAGES, settings=vars(options), **measured)
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = parser_with(__doc__, "images", "mosaic", "height", "width", "folder", count=196, batch_size=32, repeats=3)
    parser.add_argument("--samples", type=positive_int, default=5_888, help="number of rows; images are repeated")
    parser.add_argument("--encoder-ms", type=float, default=11.7, help="time for a batch; 11.7 is a compiled H100's")
    parser.add_argument("--decode", choices=("stub", "real"), default="real")
    parser.add_argument("--workers", default="auto", help="run.workers of the build: a number, or auto")
    parser.add_argument("--samples-per-shard", type=positive_int, default=1_024)
    peers = ["DataLoader", "SPDL", "Ray Data", "Daft"]
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers, help="peers to compare with")
    return parser


def config_of(folder: Path, options: argparse.Namespace) -> Any:
    """Write images and list, and return the config of a build of them; rows share image files."""
    from precompute.config import BuildConfig

    images = folder / "images"
    images.mkdir()
    for number, data in enumerate(files := jpegs_of(options)):
        (images / f"{number:06d}.jpg").write_bytes(data)
    rows = [
        {"id": f"{row}", "image": f"{row % len(files):06d}.jpg", "conversations": []} for row in range(options.samples)
    ]
    (folder / "chat.json").write_bytes(msgspec.json.encode(rows))
    values = {
        "cache": folder / "cache",
        "source.kind": "llava",
        "source.path": folder / "chat.json",
        "source.images": images,
        "image.height": options.height,
        "image.width": options.width,
        "encoder.model": folder / "model",
        "encoder.batch_size": options.batch_size,
        "encoder.device": "cpu",
        "store.samples_per_shard": options.samples_per_shard,
        "run.workers": options.workers,
    }
    return parse_config(BuildConfig, [f"--{name}={value}" for name, value in values.items()])


def summary(options: argparse.Namespace, seconds: dict[str, list[float]], parts: dict[str, float]) -> dict[str, Any]:
    """Return images/s of each rival, and our build's share of the encoder and of the slower of decoding and encoder."""
    speeds = {work: rates(options.samples, each) for work, each in seconds.items() if work != ENCODER or any(each)}
    ours = speeds[OURS]
    found: dict[str, Any] = {
        "images_per_s": spread(ours, 1),
        "rivals": {work: spread(each, 1) for work, each in speeds.items() if work != OURS},
        "over_rivals": {
            work: spread([our / their for our, their in zip(ours, each, strict=True)])
            for work, each in speeds.items()
            if work != OURS
        },
        "cpu_us_an_image": parts,
    }
    if ENCODER in speeds:
        found["share_of_encoder"] = found["over_rivals"][ENCODER]
    bounds = [speeds[work] for work in (ENCODER, DECODING) if work in speeds]
    if bounds:
        found["share_of_the_slower"] = spread([our / min(bound) for our, *bound in zip(ours, *bounds, strict=True)])
    return found


def print_table(measured: dict[str, Any]) -> None:
    print(f"{'':<28}{'images/s':>10}{'the build over it':>22}")
    print(f"{OURS:<28}{measured['images_per_s']['median']:>10,.0f}")
    for rival, speed in measured["rivals"].items():
        over = measured["over_rivals"][rival]
        print(f"{rival:<28}{speed['median']:>10,.0f}{over['median']:>10.2f} ({over['min']:.2f}-{over['max']:.2f})")
    for rival, problem in measured["skipped"].items():
        print(f"{rival:<28}not measured: {problem}")
    print("CPU time, us an image")
    for part, us in measured["cpu_us_an_image"].items():
        print(f"  {part:<26}{us:>10,.1f}")


if __name__ == "__main__":
    sys.exit(main())
