"""Measure images per second of a build with `run.engine: ray` against Ray Data's `map_batches`, on the same cores.

Both get the same images, recipe and encoder; the record tells whether they give the same samples. Whole jobs take turns
in one Ray; in each job, workers start and load the encoder. Ray Data writes Parquet.
"""

import argparse
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.build import arguments, option_parser, write_images
from benchmarks.record import print_record
from benchmarks.timing import interleaved_seconds, rates, speedups, spread
from cache_store import open_cache
from cache_store.program.command_line import parse_config
from cache_store.program.running import run_program, usable_cores
from precompute.config import BuildConfig

PACKAGES = ("ray", "torch", "diffusers", "numpy", "pillow", "pyarrow", "encode-once")
ALONE = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.ray_data", run, argv)


def run(argv: Sequence[str]) -> int:
    options = option_parser(__doc__, "model").parse_args(argv)
    os.environ.update(ALONE)
    ray: Any = importlib.import_module("ray")
    from precompute.rerun.steps import build

    with tempfile.TemporaryDirectory(prefix="ray-data-", dir=options.folder) as name:
        folder = Path(name)
        save_model(folder / "model", options)
        write_images(folder / "images", options, options.count)
        options_of_ray = ["--run.engine", "ray", "--encoder.device", "cpu"]
        config = parse_config(BuildConfig, arguments(folder, "images", options)[1:] + options_of_ray)

        def ours() -> None:
            shutil.rmtree(config.cache, ignore_errors=True)
            build(config)

        ray.init(address="local", num_cpus=usable_cores(), log_to_driver=False, logging_level="error")
        try:
            theirs = partial(by_ray_data, ray, config, folder / "parquet")
            works: dict[str, Callable[[], None]] = {"actors": ours, "Ray Data": theirs}
            seconds = interleaved_seconds(works, options.repeats)
        finally:
            ray.shutdown()
        measured: dict[str, Any] = {
            "images_per_s": {work: spread(rates(options.count, each)) for work, each in seconds.items()},
            "actors_over_ray_data": spread(speedups(seconds["Ray Data"], seconds["actors"])),
            "equal_samples": equal_samples(config.cache, folder / "parquet"),
        }
    for part, figures in measured.items():
        print(f"{part:<24}{figures}")
    print_record("ray_data", PACKAGES, settings=vars(options), **measured)
    return 0


def save_model(folder: Path, options: argparse.Namespace) -> None:
    from benchmarks.build_parts import save_vae

    if options.model:
        shutil.copytree(options.model, folder)
    else:
        save_vae(folder, options.vae)


def by_ray_data(ray: Any, config: BuildConfig, output: Path) -> None:
    """Decode in tasks, encode in actors, write rows as they come."""
    shutil.rmtree(output, ignore_errors=True)
    ray.data.DataContext.get_current().enable_progress_bars = False
    paths = sorted(Path(config.source.path).iterdir())
    (
        ray.data.from_items([{"row": row, "path": str(path)} for row, path in enumerate(paths)])
        .map(partial(decode_row, config=config))
        .map_batches(
            EncodeBatches,
            fn_constructor_args=(config,),
            batch_size=config.encoder.batch_size,
            compute=ray.data.ActorPoolStrategy(size=max(1, usable_cores() // 2)),
            num_cpus=1,
        )
        .write_parquet(str(output))
    )


def decode_row(item: dict[str, Any], config: BuildConfig) -> dict[str, Any]:
    from precompute.images.decode import decode_image
    from precompute.images.fit import fit_image, to_pixels

    image = decode_image(Path(item["path"]).read_bytes(), config.image.recipe)
    return {"row": item["row"], "pixels": to_pixels(fit_image(image, config.image.recipe))}


class EncodeBatches:
    """A Ray Data actor with the encoder of a build's worker."""

    def __init__(self, config: BuildConfig) -> None:
        import torch

        from precompute.encode.worker import ENCODER_THREADS
        from precompute.encoders.registry import load_encoder

        torch.set_num_threads(ENCODER_THREADS)
        self._encoder = load_encoder(config.encoder, config.image.range)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import torch

        samples = self._encoder.encode(torch.from_numpy(np.stack(list(batch["pixels"])))).cpu().numpy()
        return {
            "row": batch["row"],
            "sample": np.array([each.astype(np.float16).tobytes() for each in samples], object),
        }


def equal_samples(cache: str, output: Path) -> str:
    """Return how many samples have the same bytes in both, as `n of all`."""
    table = pq.read_table(output).sort_by("row")
    ours = open_cache(cache).read(np.arange(table.num_rows))
    equal = [our.tobytes() == their for our, their in zip(ours, table["sample"].to_pylist(), strict=True)]
    return f"{sum(equal)} of {len(equal)}"


if __name__ == "__main__":
    sys.exit(main())
