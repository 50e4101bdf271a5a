"""Measure the time and peak memory that a cache costs besides its latents, by the number of samples.

A cache is planned by `precompute plan`; its first shard is built, and the files of all others are links to those of the
first, with real commit records. Every step runs in its own process. Memory is that process's peak resident size
(VmHWM), imports included; time excludes imports. The table shows processor time, which other work on the machine
changes least; the record also has wall time.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor

from benchmarks.harness import parser_with, positive_int, print_record, program
from cache_store import Cache, open_cache
from cache_store.cache.metadata import open_plan, read_spec
from cache_store.format.formats import files_of_shard
from cache_store.format.layout import COMMITS, SEAL_FILE, commit_file
from cache_store.format.record import canonical_json, parse_signed, sign
from cache_store.format.schema import CommitRecord
from cache_store.program.command_line import parse_config
from cache_store.storage.local import LocalStore
from cache_store.verify.verify import verify
from precompute.build.request import BuildRequest
from precompute.build.steps import build, build_rank, plan_for_ranks, seal_after_ranks
from precompute.config import BuildConfig
from precompute.encode.rank import Rank

# Axes: N images, Y X pixels.

PER_SHARD = 4_096
BATCH, BATCHES = 256, 20
REQUEST = BuildRequest()
LISTS = {"parquet": "list.parquet", "llava": "list.jsonl"}
PACKAGES = ("numpy", "pyarrow", "msgspec", "torch", "encode-once")

Work = Callable[[], object]


def run(argv: Sequence[str]) -> int:
    parser = option_parser()
    options = parser.parse_args(argv)
    if options.step and not options.folder:
        parser.error("--step measures a cache in --folder; name it")
    if options.step:
        print(json.dumps(measured(options.step, Path(options.folder))))
        return 0
    results = {}
    for samples in (-(-each // PER_SHARD) * PER_SHARD for each in options.samples):
        with tempfile.TemporaryDirectory(prefix="scale-", dir=options.folder) as folder:
            results[samples] = steps_of(Path(folder), samples)
    print(f"{'':<16}" + "".join(f"{samples:>24,}" for samples in results))
    for step in STEPS:
        cells = [f"{each[step]['cpu_seconds']:.2f} s {each[step]['peak_mib']:,.0f} MiB" for each in results.values()]
        print(f"{step:<16}" + "".join(f"{cell:>24}" for cell in cells))
    print_record(options, PACKAGES, samples_per_shard=PER_SHARD, results=results)
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = parser_with(__doc__, "folder")
    sizes = "one cache of each size, in whole shards of 4,096"
    parser.add_argument("--samples", type=positive_int, nargs="+", default=[10**5, 10**6], help=sizes)
    parser.add_argument("--step", choices=STEPS, help="measure one step of the cache in --folder")
    return parser


def steps_of(folder: Path, samples: int) -> dict[str, dict[str, float]]:
    """Measure every step, each in its own process, in the order of a cache's making."""
    write_lists(folder, samples)
    results = {step: in_process(step, folder) for step in ("plan-lines", "plan-parquet")}
    build_first_shard(folder)
    results |= {step: in_process(step, folder) for step in ("seal", "open", "map", "read", "quick", "rerun")}
    drop_half(folder / "cache")
    return results | {step: in_process(step, folder) for step in ("rerun-half", "rank-half")}


def in_process(step: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.scale", "--step", step, "--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{folder.name} {step}: {result}", file=sys.stderr, flush=True)
    return result


def measured(step: str, folder: Path) -> dict[str, float]:
    work = STEPS[step](folder)
    before, start, cpu = status_mib("VmHWM"), time.perf_counter(), time.process_time()
    work()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    times = {"seconds": round(seconds, 3), "cpu_seconds": round(cpu_seconds, 3)}
    # Pages of mapped files, 64 KiB around each place read, count too; the system drops them when it needs memory.
    memory = {"peak_mib": status_mib("VmHWM"), "peak_mib_before": before, "own_mib_after": status_mib("RssAnon")}
    return {**times, **memory}


def status_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(round(int(line.split()[1]) / 1024, 1) for line in lines if line.startswith(field))


class Flat:
    """The caches' encoder: samples are zeros, of half a KB, since the figures do not depend on their size."""

    identity = "flat"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None: ...

    def layout(self, size: Sequence[int]) -> dict[str, int]:
        _, height, width = size
        return {"channel": 16, "latent_y": height // 8, "latent_x": width // 8}

    def encode(self, pixels_N3TYX: Tensor) -> Tensor:
        return torch.zeros(len(pixels_N3TYX), *self.layout(pixels_N3TYX.shape[2:]).values())


def config_of(folder: Path, kind: str, cache: str = "cache") -> BuildConfig:
    values = {
        "cache": folder / cache,
        "source.kind": kind,
        "source.path": folder / LISTS[kind],
        **({"source.images": folder} if kind == "llava" else {}),
        "image.height": 32,
        "image.width": 32,
        "encoder.model": "benchmarks.scale:Flat",
        "encoder.device": "cpu",
        "store.samples_per_shard": PER_SHARD,
    }
    return parse_config(BuildConfig, [f"--{name}={value}" for name, value in values.items()])


def write_lists(folder: Path, count: int) -> None:
    """Write JSON Lines in LLaVA's form, which all name one image beside them; and rows of Parquet that contain it."""
    stream = io.BytesIO()
    Image.new("RGB", (32, 32)).save(stream, "PNG")
    (folder / "a.png").write_bytes(stream.getvalue())
    turns = '[{"from": "human", "value": "<image>\\nDescribe it."}, {"from": "gpt", "value": "%s"}]'
    line = '{"id": "%09d", "image": "a.png", "conversations": ' + turns + "}\n"
    with (folder / LISTS["llava"]).open("w") as lines:
        lines.writelines(line % (number, text_of(number)) for number in range(count))
    kinds = pa.schema([("image", pa.binary()), ("id", pa.string()), ("caption", pa.string())])
    with pq.ParquetWriter(folder / LISTS["parquet"], kinds, compression="zstd") as writer:
        for first in range(0, count, 65_536):
            numbers = range(first, min(first + 65_536, count))
            images, ids = [stream.getvalue()] * len(numbers), [f"{each:09d}" for each in numbers]
            columns = [images, ids, [text_of(each) for each in numbers]]
            writer.write_table(pa.table([pa.array(each) for each in columns], schema=kinds))


def text_of(number: int) -> str:
    """Return a caption of LLaVA-CC3M's usual length that differs from all others."""
    return f"a photograph of thing number {number}, taken from the left on a fine day"


def build_first_shard(folder: Path) -> None:
    """Build the first shard; link the files of all others to it, and write their records, without a sync."""
    store = LocalStore(folder / "cache")
    spec = read_spec(store)
    plan = open_plan(store, spec)
    digests = [digest for part in range(plan.parts) for digest in plan.part(part).stated_digests.shards]
    build_rank(config_of(folder, "parquet"), REQUEST, Rank(index=0, world_size=max(2, spec.num_shards)))
    first = parse_signed(CommitRecord, store.read(commit_file(0)), commit_file(0))
    for shard in range(1, spec.num_shards):
        names, files = files_of_shard(spec, shard), []
        for name, file in zip(names, first.content.files, strict=True):
            (folder / "cache" / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(folder / "cache" / file.path, folder / "cache" / name)
            files.append(msgspec.structs.replace(file, path=name))
        facts = {"shard": shard, "first_row": spec.shard_rows(shard).start, "samples": digests[shard]}
        content = msgspec.structs.replace(first.content, **facts, files=tuple(files))
        record = sign(msgspec.structs.replace(first, content=content))
        (folder / "cache" / commit_file(shard)).write_bytes(canonical_json(record))


def drop_half(cache: Path) -> None:
    """Delete the seal and half of the records, as if the build had been killed halfway."""
    (cache / SEAL_FILE).unlink()
    records = sorted((cache / COMMITS).iterdir())
    for record in records[(len(records) + 1) // 2 :]:
        record.unlink()


def planning(kind: str, cache: str = "cache") -> Callable[[Path], Work]:
    """List the samples and write the plan; or, where it is written, decide what is left to build."""
    return lambda folder: lambda: plan_for_ranks(config_of(folder, kind, cache), REQUEST)


def mapping(folder: Path) -> Work:
    """Look up a sample of every shard, as an epoch's first batches do."""
    cache = open_cache(folder / "cache")
    return lambda: map_all(cache)


def map_all(cache: Cache) -> None:
    for shard in range(cache.spec.num_shards):
        cache.shards.mapped(shard)


def reading(folder: Path) -> Work:
    """Read twenty random batches, after all shards were looked up and twenty other batches were read."""
    cache, rng = open_cache(folder / "cache"), np.random.default_rng(0)
    map_all(cache)

    def work() -> None:
        for _ in range(BATCHES):
            cache.read(rng.integers(len(cache), size=BATCH), check=False)

    work()
    return work


def running_again_as_rank(folder: Path) -> Work:
    """Decide what is left of the plan, as each rank does; this rank has no shard."""
    rank = Rank(index=10**6, world_size=10**6 + 1)
    return lambda: build_rank(config_of(folder, "parquet"), REQUEST, rank)


STEPS: dict[str, Callable[[Path], Work]] = {
    "plan-lines": planning("llava", "cache-of-lines"),
    "plan-parquet": planning("parquet"),
    "seal": lambda folder: lambda: seal_after_ranks(config_of(folder, "parquet"), REQUEST),
    "open": lambda folder: lambda: open_cache(folder / "cache"),
    "map": mapping,
    "read": reading,
    "quick": lambda folder: lambda: verify(folder / "cache", "quick"),
    "rerun": lambda folder: lambda: build(config_of(folder, "parquet"), REQUEST),
    "rerun-half": planning("parquet"),
    "rank-half": running_again_as_rank,
}
"""For each step, the function that prepares it and returns the work to time."""

main = program(run)

if __name__ == "__main__":
    sys.exit(main())
