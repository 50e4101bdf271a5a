"""Measure the time, memory and files that a cache costs besides its latents, by the number of samples.

A cache is planned by `precompute plan`; its first two shards are built, and the files of all others are links to those,
with real commit records. The easy case has 4,096 rows a shard, short captions, and ids in order. The hard one
(`--hard`) has 64 rows a shard, captions of 1,500 characters, ids in no order, latents of 128 channels, and one row in
1,024 rejected. Every step runs in its own process. Memory is what the process takes at most, more than at the step's
start; time excludes imports. The table shows processor time, which other work on the machine changes least, and how
many files the step opened; for steps at a store 20 ms away (`benchmarks/object_server.py`), wall time and requests. The
record has all of them.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor

from benchmarks.harness import parser_with, positive_int, print_record, program
from benchmarks.object_server import BUCKET, Network, environment, serving, take_counts
from cache_store import open_cache
from cache_store.cache.commit import write_rows
from cache_store.cache.metadata import file_record, open_plan, open_table, read_spec
from cache_store.cache.survey import survey_as_rank
from cache_store.format.formats import files_of_shard
from cache_store.format.layout import COMMITS, SEAL_FILE, commit_file, samples_file
from cache_store.format.record import canonical_json, parse_signed, sign
from cache_store.format.schema import CommitRecord, FileRecord
from cache_store.format.tables import SUMS_KEY
from cache_store.program.command_line import parse_config
from cache_store.storage.local import LocalStore
from cache_store.verify.verify import verify
from precompute.build.request import BuildRequest
from precompute.build.steps import build, build_rank, open_build_inputs, plan_for_ranks, planned_work, seal_after_ranks
from precompute.config import BuildConfig
from precompute.encode.rank import Rank
from trainer import LatentStream

# Axes: N images, Y X pixels.

BATCH, BATCHES = 256, 20
PER_TAR = 8_192
"""Samples of a tar, and of a row group; 32 tars are a part of the plan."""
STORE = Network(latency_ms=20)
REQUEST = BuildRequest()
SOURCES = {"parquet": "list.parquet", "webdataset": "tars"}
PACKAGES = ("numpy", "pyarrow", "msgspec", "torch", "obstore", "encode-once")

Work = Callable[[], object]
Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What decides how hard a cache is."""

    per_shard: int
    encoder: str
    caption_chars: int
    is_ordered: bool
    """Whether ids ascend."""
    rejecting: int
    """One of so many shards has a rejected row, its first; 0: none has."""

    def sample(self, number: int, image: bytes) -> tuple[str, bytes, str]:
        """Return id, file and caption of a sample; `image` is the file of one that is not rejected."""
        start = number * 7_919 % (len(words()) - self.caption_chars)
        is_rejected = self.rejecting and number % (self.rejecting * self.per_shard) == 0
        name = f"{number:09d}" if self.is_ordered else f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}"
        caption = f"{number} {words()[start : start + self.caption_chars]}"
        return name, b"no image" if is_rejected else image, caption


EASY = Case(per_shard=4_096, encoder="Flat", caption_chars=70, is_ordered=True, rejecting=0)
HARD = Case(per_shard=64, encoder="Wide", caption_chars=1_500, is_ordered=False, rejecting=16)


@dataclass(frozen=True)
class Bench:
    """A cache of a case, in a folder with its sources."""

    case: Case
    folder: Path
    url: str | None = None
    """The cache's URL, if it is read from a store."""

    @property
    def cache(self) -> str | Path:
        return self.url or self.folder / "cache"

    def config(self, kind: str) -> BuildConfig:
        values = {
            "cache": self.cache if kind == "parquet" else self.folder / "cache-of-tars",
            "source.kind": kind,
            "source.path": self.folder / SOURCES[kind],
            "encoder.model": f"benchmarks.scale:{self.case.encoder}",
            "encoder.device": "cpu",
            "image.height": 32,
            "image.width": 32,
            "store.samples_per_shard": self.case.per_shard,
            "run.max_reject_fraction": 0.1,
        }
        return parse_config(BuildConfig, [f"--{name}={value}" for name, value in values.items()])


def run(argv: Sequence[str]) -> int:
    parser = parser_with(__doc__, "folder")
    sizes = "one cache of each size, in whole shards"
    parser.add_argument("--samples", type=positive_int, nargs="+", default=[10**5, 10**6], help=sizes)
    parser.add_argument("--hard", action="store_true", help="measure the hard case")
    parser.add_argument("--step", nargs="+", metavar="NAME FOLDER", help="measure one step, of a cache that is there")
    options = parser.parse_args(argv)
    case = HARD if options.hard else EASY
    if options.step:
        step, folder, *url = options.step
        print(json.dumps(measured(step, Bench(case, Path(folder), *url))))
        return 0
    results = {}
    for samples in (-(-each // case.per_shard) * case.per_shard for each in options.samples):
        with tempfile.TemporaryDirectory(prefix="scale-", dir=options.folder) as folder:
            results[samples] = steps_of(Bench(case, Path(folder)), samples)
    print(f"{'':<18}" + "".join(f"{samples:>36,}" for samples in results))
    for step in next(iter(results.values())):
        print(f"{step:<18}" + "".join(f"{shown(each[step]):>36}" for each in results.values()))
    print_record(options, PACKAGES, samples_per_shard=case.per_shard, results=results)
    return 0


def shown(figures: Figures) -> str:
    """Write the figures of a step for people: of a store, wall time and requests."""
    time_of, count = ("seconds", "requests") if "requests" in figures else ("cpu_seconds", "opened")
    return f"{figures[time_of]:.2f} s {figures['peak_mib']:,.1f} MiB {figures[count]:,} {count}"


def steps_of(bench: Bench, samples: int) -> dict[str, Figures]:
    """Measure every step, each in its own process, in the order of a cache's making."""
    write_sources(bench, samples)
    results = {step: in_process(step, bench) for step in ("plan-tars", "plan-parquet")}
    build_shards(bench)
    results |= {step: in_process(step, bench) for step in [*STEPS][2:-1]} | at_store(bench, "open", "stream")
    drop_half(bench.folder / "cache")
    return results | {"rank-half": in_process("rank-half", bench)} | at_store(bench, "rank-half")


def at_store(bench: Bench, *steps: str) -> dict[str, Figures]:
    """Measure steps of a cache in a store, if the package that reads stores is installed."""
    results = dict[str, Figures]()
    if find_spec("obstore"):
        with serving(bench.folder, STORE) as endpoint:
            for step in steps:
                take_counts(endpoint)
                there = replace(bench, url=f"s3://{BUCKET}/cache")
                figures = in_process(step, there, os.environ | environment(endpoint))
                results[f"{step}-at-store"] = figures | {"requests": take_counts(endpoint).requests}
    return results


def in_process(step: str, bench: Bench, env: Mapping[str, str] | None = None) -> Figures:
    command = [sys.executable, "-m", "benchmarks.scale", *["--hard"] * (bench.case == HARD), "--step", step]
    command += [str(bench.folder), *filter(None, [bench.url])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    result: Figures = json.loads(done.stdout.splitlines()[-1])
    print(f"{bench.folder.name} {step}: {result}", file=sys.stderr, flush=True)
    return result


def measured(step: str, bench: Bench) -> Figures:
    work, names = STEPS[step](bench), list[str]()
    sys.addaudithook(lambda event, arguments: names.append(str(arguments[0])) if event == "open" else None)
    names.clear()
    Path("/proc/self/clear_refs").write_text("5")  # so that the peak is that of the step
    peak, own = status_mib("VmHWM"), status_mib("RssAnon")
    start, cpu = time.perf_counter(), time.process_time()
    held = work()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    # Pages of mapped files, 64 KiB around each place read, count too; the system drops them when it needs memory.
    figures = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mib": status_mib("VmHWM") - peak}
    figures |= {"own_mib": status_mib("RssAnon") - own, "base_mib": peak}
    del held
    opened = sum(str(bench.folder) in name for name in names)
    held_open = len([*Path("/proc/self/fd").iterdir()])
    return {name: round(each, 3) for name, each in figures.items()} | {"opened": opened, "held_open": held_open}


def status_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


class Flat:
    """The easy caches' encoder: samples are zeros, of half a KB, since the figures do not depend on their size."""

    identity, channels = "flat", 16

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None: ...

    def layout(self, size: Sequence[int]) -> dict[str, int]:
        _, height, width = size
        return {"channel": self.channels, "latent_y": height // 8, "latent_x": width // 8}

    def encode(self, pixels_N3TYX: Tensor) -> Tensor:
        return torch.zeros(len(pixels_N3TYX), *self.layout(pixels_N3TYX.shape[2:]).values())


class Wide(Flat):
    """The hard caches' encoder; its samples have 4 KB."""

    channels = 128


@cache
def words() -> str:
    """Return 16 MB of random words, of which captions are pieces."""
    rng = np.random.default_rng(0)
    known = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 10)).tolist())) for _ in range(4_096)]
    return " ".join(known[each] for each in rng.integers(len(known), size=2_500_000).tolist())


def write_sources(bench: Bench, count: int) -> None:
    """Write the samples as one Parquet file, and as tars with an image and a text for each."""
    Image.new("RGB", (32, 32)).save(stream := io.BytesIO(), "PNG")
    (folder := bench.folder / SOURCES["webdataset"]).mkdir()
    kinds = pa.schema([("id", pa.string()), ("image", pa.binary()), ("caption", pa.string())])
    with pq.ParquetWriter(bench.folder / SOURCES["parquet"], kinds, compression="zstd") as writer:
        for first in range(0, count, PER_TAR):
            numbers = range(first, min(first + PER_TAR, count))
            samples = [bench.case.sample(number, stream.getvalue()) for number in numbers]
            writer.write_table(pa.table([*map(pa.array, zip(*samples, strict=True))], schema=kinds))
            with tarfile.open(folder / f"{first // PER_TAR:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
                for name, image, caption in samples:
                    for extension, data in (("png", image), ("txt", caption.encode())):
                        member = tarfile.TarInfo(f"{name}.{extension}")
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))


def build_shards(bench: Bench) -> None:
    """Build two shards, the first with a rejected row; give all others their files, and records, without a sync."""
    store = LocalStore(bench.folder / "cache")
    spec = read_spec(store)
    plan = open_plan(store, spec)
    digests = [digest for part in range(plan.parts) for digest in plan.part(part).stated_digests.shards]
    for index in range(2):
        build_rank(bench.config("parquet"), REQUEST, Rank(index=index, world_size=max(2, spec.num_shards)))
    names = map(commit_file, range(spec.num_shards)[:2])
    built = [parse_signed(CommitRecord, store.read(name), name) for name in names]
    for shard in range(2, spec.num_shards):
        like = built[min(1, shard % max(1, bench.case.rejecting))]
        pairs = zip(files_of_shard(spec, shard), like.content.files, strict=True)
        files = tuple(with_rows(store, file, name, spec.shard_rows(shard)) for name, file in pairs)
        facts = {"shard": shard, "first_row": spec.shard_rows(shard).start, "samples": digests[shard], "files": files}
        record = sign(msgspec.structs.replace(like, content=msgspec.structs.replace(like.content, **facts)))
        (bench.folder / "cache" / commit_file(shard)).write_bytes(canonical_json(record))


def with_rows(store: LocalStore, file: FileRecord, name: str, rows: range) -> FileRecord:
    """Link a file; but write a samples table with a rejected row anew, so that it names the row."""
    path = Path(store.where(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.path != samples_file(0):
        os.link(store.where(file.path), path)
        return msgspec.structs.replace(file, path=name)
    table = open_table(store, file.path)
    samples = table.whole().set_column(0, "row", pa.array(rows, pa.int64()))
    with path.open("wb") as stream:
        write_rows(stream, samples, b64decode(table.metadata.metadata[SUMS_KEY.encode()]))
    return file_record(store, name)


def drop_half(root: Path) -> None:
    """Delete the seal and half of the records, as if the build had been killed halfway."""
    (root / SEAL_FILE).unlink()
    records = sorted((root / COMMITS).iterdir())
    for record in records[(len(records) + 1) // 2 :]:
        record.unlink()


def started(bench: Bench) -> Iterator[object]:
    """Open a stream in the middle of its fourth epoch, and read a batch."""
    stream = LatentStream(bench.cache, BATCH, epochs=None)
    stream.load_state_dict({"cursor": 7 * len(stream.cache) // 2 // BATCH * BATCH})
    batches = iter(stream)
    next(batches)
    return batches


def streaming(bench: Bench) -> Work:
    """Read more batches of a stream that has begun."""
    batches = started(bench)
    return lambda: deque(islice(batches, BATCHES), maxlen=0)


def mapping(bench: Bench) -> Work:
    """Look up where the samples of every shard lie, as an epoch does."""
    opened = open_cache(bench.cache)
    return lambda: deque(map(opened.shards.mapped, range(opened.spec.num_shards)), maxlen=0)


def running(command: Callable[[BuildConfig, BuildRequest], object], kind: str = "parquet") -> Callable[[Bench], Work]:
    """Run a command of `precompute`, whose imports are made before."""

    def prepare(bench: Bench) -> Work:
        config = bench.config(kind)
        open_build_inputs(config, REQUEST)
        return lambda: command(config, REQUEST)

    return prepare


RANK = Rank(index=1, world_size=64)


def rank_started(config: BuildConfig, request: BuildRequest) -> object:
    """Decide what is left of the plan for one rank of 64."""
    inputs = open_build_inputs(config, request)
    return planned_work(inputs, survey_as_rank(inputs.store, RANK.shards_of), RANK)


STEPS: dict[str, Callable[[Bench], Work]] = {
    "plan-tars": running(plan_for_ranks, "webdataset"),
    "plan-parquet": running(plan_for_ranks),
    "seal": running(seal_after_ranks),
    "open": lambda bench: lambda: open_cache(bench.cache),
    "stream": lambda bench: lambda: started(bench),
    "batches": streaming,
    "map": mapping,
    "quick": lambda bench: lambda: verify(bench.cache, "quick"),
    "rerun": running(build),
    "rank-half": running(rank_started),
}
"""For each step, the function that prepares it and returns the work to time."""

main = program(run)

if __name__ == "__main__":
    sys.exit(main())
