"""Pipelines that users would write or choose in place of a build, around the stand-in of `benchmarks.feed`.

Each decodes with as many processes or threads as there are cores, as its documentation advises, and saves one file a
batch with np.save; none checks, hashes or sums anything. Each returns its seconds, counted as those of a build.
"""

# Axes: N images of a batch, Y X pixels, 3 RGB.

import contextlib
import importlib
import io
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.feed_parts import Feed
from benchmarks.feed_stand_in import SleepingEncoder, StandIn, stand_in_of
from cache_store.program.running import usable_cores

MODULES = {"DataLoader": "torch", "SPDL": "spdl.io", "Ray Data": "ray.data", "Daft": "daft"}
DECODES_ITSELF = ("Ray Data", "Daft")
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "DO_NOT_TRACK": "true",
    "DAFT_PROGRESS_BAR": "0",
}


def reason_to_skip(peer: str, feed: Feed) -> str | None:
    """Return why the peer cannot be measured here; None if it can."""
    os.environ.update(ENVIRONMENT)
    if feed.stand_in.is_stubbed and peer in DECODES_ITSELF:
        return "it decodes by itself"
    try:
        importlib.import_module(MODULES[peer])
        if peer == "SPDL" and not feed.stand_in.is_stubbed:
            importlib.import_module("spdl.io").load_image_batch(feed.paths[:1], width=8, height=8)
    except (ImportError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return None


def timed(feed: Feed, work: Callable[[Path], object]) -> float:
    """Return the seconds, from the first image, of a work that writes into a folder."""
    folder = Path(feed.config.cache).with_name("peer")
    folder.mkdir()
    feed.stand_in.forget()
    work(folder)
    ended, count = time.monotonic(), sum(len(np.load(path, mmap_mode="r")) for path in folder.iterdir())
    assert count == feed.samples, (count, feed.samples)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    return ended - feed.stand_in.began


def save(folder: Path, number: int, samples_NCHW: torch.Tensor) -> None:
    np.save(folder / f"{number:06d}.npy", samples_NCHW.numpy().astype(np.float16))


class Images(torch.utils.data.Dataset[np.ndarray]):
    """A data set as users write it."""

    def __init__(self, paths: list[str], stand_in: StandIn) -> None:
        self._paths, self._stand_in, self._has_begun = paths, stand_in, False

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, row: int) -> np.ndarray:
        if not self._has_begun:
            self._stand_in.stamp("read")
            self._has_begun = True
        data = Path(self._paths[row]).read_bytes()
        if self._stand_in.is_stubbed:
            return self._stand_in.pixels.copy()
        image = Image.open(io.BytesIO(data)).convert("RGB")
        return np.array(image.resize((self._stand_in.width, self._stand_in.height), Image.Resampling.BILINEAR))


def by_data_loader(feed: Feed) -> float:
    """Measure a DataLoader with one process per core."""
    loader = torch.utils.data.DataLoader(
        Images(feed.paths, feed.stand_in), feed.config.encoder.batch_size, num_workers=usable_cores()
    )

    def work(folder: Path) -> None:
        feed.stand_in.stamp("loaded")
        encoder = feed.encoder
        for number, pixels_NYX3 in enumerate(loader):
            save(folder, number, encoder.encode(pixels_NYX3))

    return timed(feed, work)


def batches_of(paths: list[str], size: int) -> Iterable[list[str]]:
    return (paths[start : start + size] for start in range(0, len(paths), size))


def by_spdl(feed: Feed) -> float:
    """Measure SPDL with one thread per core, each decoding a batch with SPDL's own decoder (FFmpeg's)."""
    spdl_io, pipeline = (importlib.import_module(f"spdl.{name}") for name in ("io", "pipeline"))
    stand_in, threads = feed.stand_in, usable_cores()

    def load(paths: list[str]) -> np.ndarray:
        stand_in.stamp("read")
        if stand_in.is_stubbed:
            return np.stack([stand_in.pixels for path in paths if Path(path).read_bytes()])
        decoded = spdl_io.load_image_batch(paths, width=stand_in.width, height=stand_in.height, pix_fmt="rgb24")
        return np.asarray(spdl_io.to_numpy(decoded))

    def work(folder: Path) -> None:
        stand_in.stamp("loaded")
        encoder = feed.encoder
        source = batches_of(feed.paths, feed.config.encoder.batch_size)
        builder = pipeline.PipelineBuilder().add_source(source).pipe(load, concurrency=threads).add_sink(4)
        built = builder.build(num_threads=threads)
        with built.auto_stop():
            for number, pixels_NYX3 in enumerate(built):
                save(folder, number, encoder.encode(torch.from_numpy(pixels_NYX3)))

    return timed(feed, work)


class EncodeBatches:
    """A Ray Data actor, or a Daft class, that encodes batches and saves them."""

    def __init__(self, model: str, config: Any, folder: str) -> None:
        stand_in = stand_in_of(model)
        self._encoder, self._folder = SleepingEncoder(stand_in, config), Path(folder)
        self._stand_in, self._count = stand_in, 0
        stand_in.stamp("loaded")

    def save(self, images: Iterable[np.ndarray]) -> list[int]:
        pixels_NYX3 = np.stack(list(images))
        self._stand_in.stamp("read")
        save(self._folder, self._count, self._encoder.encode(torch.from_numpy(pixels_NYX3)))
        self._count += 1
        return [len(pixels_NYX3)] * len(pixels_NYX3)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"size": self.save(batch["image"])}


def by_ray_data(feed: Feed) -> float:
    """Measure `read_images` in tasks and one actor that encodes, from the first batch that reaches the actor."""
    ray: Any = importlib.import_module("ray")
    ray.data = importlib.import_module("ray.data")
    ray.init(address="local", num_cpus=usable_cores(), log_to_driver=False, logging_level="error")
    try:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        image, config = feed.config.image, feed.config.encoder

        def work(folder: Path) -> None:
            images = ray.data.read_images(feed.paths, size=(image.height, image.width), mode="RGB")
            images.map_batches(
                EncodeBatches,
                fn_constructor_args=(feed.stand_in.folder, config, str(folder)),
                batch_size=config.batch_size,
                compute=ray.data.ActorPoolStrategy(size=1),
                num_cpus=0,
            ).materialize()

        return timed(feed, work)
    finally:
        ray.shutdown()


def by_daft(feed: Feed) -> float:
    """Measure download, decode and resize as expressions and one instance that encodes, timed as Ray Data."""
    daft: Any = importlib.import_module("daft")
    image, config = feed.config.image, feed.config.encoder

    def work(folder: Path) -> None:
        encode = daft.udf(return_dtype=daft.DataType.int64(), batch_size=config.batch_size, concurrency=1)(
            series_class()
        ).with_init_args(feed.stand_in.folder, config, str(folder))
        pixels = daft.col("path").download().decode_image(mode="RGB").resize(image.width, image.height)
        daft.from_pydict({"path": feed.paths}).with_column("size", encode(pixels)).select("size").collect()

    with contextlib.redirect_stderr(io.StringIO()):
        return timed(feed, work)


def series_class() -> type:
    class EncodeSeries(EncodeBatches):
        def __call__(self, images: Any) -> Any:
            return self.save(np.asarray(each) for each in images.to_pylist())

    return EncodeSeries


PEERS: dict[str, Callable[[Feed], float]] = {
    "DataLoader": by_data_loader,
    "SPDL": by_spdl,
    "Ray Data": by_ray_data,
    "Daft": by_daft,
}
