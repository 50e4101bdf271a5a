"""Measure everything that needs a GPU, in four commands of under ten minutes each, without a network.

    python -m benchmarks.on_gpu encode                     stock, folded, compiled, replayed; at 224 and 512
    python -m benchmarks.on_gpu builds --images photos     whole builds, by cores and workers
    python -m benchmarks.on_gpu checks --images photos     the canary's differences, an audit on the CPU, an estimate
    python -m benchmarks.on_gpu tests                      the tests marked with gpu

Each prints JSON records, one a line; keep them in benchmarks/results. A CPU runs the same at toy size.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import encode
from benchmarks.build import arguments, write_images
from benchmarks.options import parser_with, positive_int
from benchmarks.record import print_record
from cache_store.program.command_line import parse_config
from cache_store.program.running import run_program, usable_cores

if TYPE_CHECKING:
    from precompute.config import BuildConfig

PACKAGES = ("torch", "diffusers", "numpy", "pillow", "encode-once")
STEADY = 0.3
"""Share of a build's images done before its rate is measured: workers have then started, compiled and captured."""
ROOT = Path(__file__).parent.parent


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.on_gpu", run, argv)


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    if options.step == "tests":
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"], cwd=ROOT, check=False
        ).returncode
    if options.step == "encode":
        return max(encode_at(side, options) for side in options.sides)
    with tempfile.TemporaryDirectory(prefix="on-gpu-", dir=options.folder) as name:
        config = config_in(Path(name), options)
        measured = {"builds": builds, "checks": checks}[options.step](config, options)
    print_record(f"on_gpu {options.step}", PACKAGES, settings=vars(options), **measured)
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = parser_with(__doc__, "images", "folder", "repeats", count=20_000, batch_size=32, vae="full", mosaic=1)
    parser.add_argument("step", choices=("encode", "builds", "checks", "tests"))
    parser.add_argument(
        "--sides", type=positive_int, nargs="+", default=[224, 512], help="sides of the images, for encode"
    )
    parser.add_argument("--height", type=positive_int, default=224)
    parser.add_argument("--width", type=positive_int, default=224)
    parser.add_argument(
        "--workers", type=positive_int, nargs="+", default=[1, 2, 4, 8], help="numbers of workers, for builds"
    )
    parser.add_argument(
        "--cores",
        type=positive_int,
        nargs="+",
        default=[4, 8, 16],
        help="numbers of cores, for builds, as far as available",
    )
    parser.add_argument("--compute-dtype", default="bfloat16")
    parser.add_argument("--base-dim", type=positive_int, default=96, help="width of the model for encode")
    return parser


def encode_at(side: int, options: argparse.Namespace) -> int:
    values = {"height": side, "width": side, "batch-size": options.batch_size, "repeats": options.repeats}
    return encode.main([f"--{name}={value}" for name, value in (values | {"base-dim": options.base_dim}).items()])


def config_in(folder: Path, options: argparse.Namespace) -> "BuildConfig":
    from benchmarks.build_parts import save_vae
    from precompute.config import BuildConfig

    save_vae(folder / "model", options.vae)
    write_images(folder / "images", options, options.count)
    config = parse_config(BuildConfig, arguments(folder, "images", options)[1:])
    return replace(config, store=replace(config.store, samples_per_shard=max(1, options.count // 40)))


def builds(config: "BuildConfig", options: argparse.Namespace) -> dict[str, Any]:
    """Return images per second of whole builds after their start, and how long each part was busy."""
    found = {}
    for cores in sorted({min(cores, usable_cores()) for cores in options.cores}):
        for workers in options.workers:
            with on_cores(cores):
                found[f"{cores} cores, {workers} workers"] = one_build(config, workers)
            print(f"{cores} cores, {workers} workers: {found[f'{cores} cores, {workers} workers']}", flush=True)
    alone = encoder_alone(config)
    best = max(found, key=lambda name: float(found[name]["images_per_s"]))
    share = round(found[best]["images_per_s"] / alone, 3)
    print(f"encoder alone: {alone:.1f} images/s; best: {best}, {share:.0%} of it")
    return {"builds": found, "encoder_alone_images_per_s": round(alone, 1), "best": best, "share_of_encoder": share}


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def one_build(config: "BuildConfig", workers: int) -> dict[str, Any]:
    from cache_store.cache.metadata import read_spec
    from cache_store.storage.store import open_store
    from precompute.encode.job import EncodeJob, Progress
    from precompute.encode.local_engine import run_local
    from precompute.encode.progress import BuildProgress
    from precompute.encoders.registry import load_encoder
    from precompute.rerun.request import BuildRequest
    from precompute.rerun.steps import plan_for_ranks
    from precompute.sources import open_source

    shutil.rmtree(config.cache, ignore_errors=True)
    config = replace(config, run=replace(config.run, workers=workers))
    plan_for_ranks(config, BuildRequest())
    store = open_store(config.cache)
    spec, started = read_spec(store), time.monotonic()
    done, steps = BuildProgress(spec.rows, [], 1.0), list[tuple[float, int]]()

    def on_progress(progress: Progress) -> None:
        done(progress)
        steps.append((time.monotonic(), done.images))

    job = EncodeJob(config=config, store=store, spec=spec, shards=range(spec.num_shards))
    encoder = load_encoder(config.encoder, config.image.range)
    run_local(job, open_source(config.source), encoder, threading.Event(), on_progress)
    done.close()
    first_s, first = next(step for step in steps if step[1] >= STEADY * spec.rows)
    steady = (spec.rows - first) / max(steps[-1][0] - first_s, 1e-9)
    return {
        "images_per_s": round(steady, 1),
        "whole_s": round(steps[-1][0] - started, 1),
        "encoder_works": round(done.encoded.working_share, 3),
        "slowest": done.encoded.slowest,
        "busy_s": {part: round(seconds, 1) for part, seconds in done.busy_s.items()},
    }


def encoder_alone(config: "BuildConfig", batches: int = 20) -> float:
    """Return images per second through a build's feed to the device, with nothing else running."""
    import numpy as np

    from precompute.encode.device_feed import feed_of
    from precompute.encoders.registry import load_encoder
    from precompute.rerun.decide import make_spec
    from precompute.rerun.facts import recipe_of

    encoder = load_encoder(config.encoder, config.image.range)
    feed = feed_of(encoder, make_spec(recipe_of(config, encoder), 1, "0" * 64).array)
    shape = (config.encoder.batch_size, config.image.height, config.image.width, 3)
    pixels_NYX3 = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    feed.encode(pixels_NYX3, len(pixels_NYX3)).samples()
    started, ahead = time.monotonic(), feed.encode(pixels_NYX3, len(pixels_NYX3))
    for _ in range(batches):
        ahead, behind = feed.encode(pixels_NYX3, len(pixels_NYX3)), ahead
        behind.samples()
    ahead.samples()
    return (batches + 1) * len(pixels_NYX3) / (time.monotonic() - started)


def checks(config: "BuildConfig", options: argparse.Namespace) -> dict[str, Any]:
    """Return the device's difference from the reference by dtype, an audit of its cache on the CPU, and an estimate."""
    from precompute.audit import audit
    from precompute.config import AuditConfig
    from precompute.estimate.config import EstimateConfig
    from precompute.estimate.estimate import estimate
    from precompute.rerun.request import BuildRequest
    from precompute.rerun.steps import seal_after_ranks

    one_build(config, 1)
    seal_after_ranks(config, BuildRequest())
    samples = min(options.count, 2 * options.batch_size)
    report = audit(config.cache, AuditConfig(samples=samples, seed=0, device="cpu"))
    values = {name: getattr(config, name) for name in ("source", "encoder", "image", "store", "run")}
    probe = estimate(EstimateConfig(cache=f"{config.cache}.none", **values, seconds=10.0)).probe
    estimated = {"encoder": probe.encode_per_s, "decoding": probe.decode_per_s, "both": probe.both_per_s}
    audited = {"findings": len(report.findings), "worst": report.quantile(1.0), "tolerance": report.tolerance}
    return {
        "canary": {dtype: asdict(difference_of(config, dtype)) for dtype in ("float32", "bfloat16")},
        "audit_on_cpu": audited | {"statement": report.statement},
        "estimated_images_per_s": {part: round(speed, 1) for part, speed in estimated.items()},
    }


def difference_of(config: "BuildConfig", dtype: Any) -> Any:
    import torch

    from precompute.encode.canary import IMAGES, difference
    from precompute.encoders.registry import load_encoder, load_reference
    from precompute.images.decode import decode_image
    from precompute.images.fit import fit_image, to_pixels

    recipe, files = config.image.recipe, sorted(Path(config.source.path).iterdir())[:IMAGES]
    fitted = (fit_image(decode_image(each.read_bytes(), recipe), recipe) for each in files)
    pixels = torch.stack([torch.from_numpy(to_pixels(image).copy()) for image in fitted])
    encoder = load_encoder(replace(config.encoder, compute_dtype=dtype), config.image.range)
    reference = load_reference(config.encoder, config.image.range)
    layout = encoder.layout(config.image.height, config.image.width)
    return difference(encoder.encode(pixels).cpu().numpy(), reference.encode(pixels).numpy(), layout)


if __name__ == "__main__":
    sys.exit(main())
