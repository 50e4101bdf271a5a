"""Measure everything that needs a GPU, in four commands of under ten minutes each, without a network.

    python -m benchmarks.on_gpu encode                     stock, folded, compiled, replayed; at 224 and 512
    python -m benchmarks.on_gpu builds --images photos     whole builds, by cores and workers
    python -m benchmarks.on_gpu checks --images photos     the canary's differences, an audit on the CPU, an estimate
    python -m benchmarks.on_gpu tests                      the tests marked with gpu

Each prints JSON records, one a line; keep them in benchmarks/results. A CPU runs the same at toy size.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import encode
from benchmarks.build import Parts, config_in, encoder_alone, save_vae
from benchmarks.harness import ROOT, parser_with, positive_int, print_record, program
from benchmarks.photographs import write_images
from cache_store.format.array import Size
from cache_store.program.running import usable_cores
from precompute.audit import audit
from precompute.build.steps import build
from precompute.config import AuditConfig, BuildConfig, EstimateConfig
from precompute.encode.canary import SAMPLES, difference
from precompute.encode.device_feed import feed_of
from precompute.encode.tolerance import Difference
from precompute.encoders.encoder_config import ComputeDtype
from precompute.encoders.registry import load_encoder, load_reference
from precompute.estimate import measure
from precompute.images.decode import decode_image
from precompute.images.fit import fit_image, placement_of

PACKAGES = ("torch", "diffusers", "numpy", "pillow", "encode-once")
DTYPES: tuple[ComputeDtype, ...] = ("float32", "bfloat16")


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    if options.step == "tests":
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"]
        return subprocess.run(command, cwd=ROOT, check=False).returncode
    if options.step == "encode":
        return max(encode_at(side, options) for side in options.sides)
    with tempfile.TemporaryDirectory(prefix="on-gpu-", dir=options.folder) as name:
        folder = Path(name)
        save_vae(folder / "model", options.vae)
        write_images(folder / "images", options, options.count)
        config = config_in(folder, "images", options, f"--store.samples_per_shard={max(1, options.count // 40)}")
        measured = {"builds": builds, "checks": checks}[options.step](config, options)
    print_record(options, PACKAGES, **measured)
    return 0


def option_parser() -> argparse.ArgumentParser:
    names = ("images", "mosaic", "height", "width", "base_dim", "folder", "repeats")
    parser = parser_with(__doc__, *names, count=20_000, batch_size=32, vae="full", compute_dtype="bfloat16")
    parser.add_argument("step", choices=("encode", "builds", "checks", "tests"))
    several: dict[str, Any] = {"type": positive_int, "nargs": "+"}
    parser.add_argument("--sides", **several, default=[224, 512], help="sides of the images, for encode")
    parser.add_argument("--workers", **several, default=[1, 2, 4, 8], help="numbers of workers, for builds")
    parser.add_argument("--cores", **several, default=[4, 8, 16], help="numbers of cores, for builds, if available")
    return parser


def encode_at(side: int, options: argparse.Namespace) -> int:
    values = {"batch-size": options.batch_size, "repeats": options.repeats, "base-dim": options.base_dim}
    return encode.main([f"--{name}={value}" for name, value in ({"height": side, "width": side} | values).items()])


def builds(config: BuildConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Return images per second of whole builds after their start, and how long each part was busy."""
    parts, found = Parts(config), {}
    for cores, workers in product(sorted({min(cores, usable_cores()) for cores in options.cores}), options.workers):
        parts.config = replace(config, run=replace(config.run, workers=workers))
        with on_cores(cores):
            found[f"{cores} cores, {workers} workers"] = parts.build()
        print(f"{cores} cores, {workers} workers: {found[f'{cores} cores, {workers} workers']}", flush=True)
    encoder = load_encoder(config.encoder, config.image_recipe)
    alone = encoder_alone(feed_of(encoder), parts.spec.array_of(0), batches=20)
    best = max(found, key=lambda name: found[name].steady_images_per_s)
    share = round(found[best].steady_images_per_s / alone, 3)
    print(f"encoder alone: {alone:.1f} images/s; best: {best}, {share:.0%} of it")
    every = {name: asdict(each) for name, each in found.items()}
    return {"builds": every, "encoder_alone_images_per_s": round(alone, 1), "best": best, "share_of_encoder": share}


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def checks(config: BuildConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Return the device's difference from the reference by dtype, an audit of its cache on the CPU, and an estimate."""
    build(config)
    samples = min(options.count, 2 * options.batch_size)
    found = audit(config.cache, AuditConfig(samples=samples, seed=0, device="cpu"))
    values = {name: getattr(config, name) for name in ("source", "encoder", "image", "store", "run")}
    paced = measure(EstimateConfig(cache=f"{config.cache}.none", **values, seconds=10.0))
    estimated: dict[str, float] = {part: round(1 / seconds, 1) for part, seconds in paced.busy_s.items()}
    audited = {"findings": len(found.findings), "worst": found.worst, "limits": found.limits}
    return {
        "canary": {dtype: asdict(difference_of(config, dtype)) for dtype in DTYPES},
        "audit_on_cpu": audited | {"statement": found.statement},
        "estimated_images_per_s": estimated | {"worker": round(1 / paced.sample_s, 1)},
    }


def difference_of(config: BuildConfig, dtype: ComputeDtype) -> Difference:
    """Compare the first images, encoded on the device in this dtype, with the reference."""
    recipe, files = config.image.recipe, sorted(Path(config.source.path).iterdir())[:SAMPLES]
    size = Size(1, config.image.height, config.image.width)
    images = (decode_image(each.read_bytes(), recipe, size) for each in files)
    fitted = (fit_image(each, recipe, placement_of(each.size, recipe, size)) for each in images)
    pixels = torch.stack([torch.from_numpy(np.array(image)[None]) for image in fitted])
    encoder = load_encoder(replace(config.encoder, compute_dtype=dtype), recipe)
    reference = load_reference(config.encoder, recipe)
    layout = encoder.array(size)
    return difference(encoder.encode(pixels).cpu().numpy(), reference.encode(pixels).numpy(), layout)


main = program(run)

if __name__ == "__main__":
    sys.exit(main())
