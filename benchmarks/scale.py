"""Measure the time and peak memory that a cache costs besides its latents, by the number of samples.

The caches are simulated: plan, records, samples tables and seal are real, shard files are sparse. Every step runs in
its own process. Memory is that process's peak resident size (VmHWM), imports included; time excludes imports. The table
shows processor time, which other work on the machine changes least; the record also has wall time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.options import parser_with, positive_int
from benchmarks.record import print_record
from benchmarks.scale_cache import PER_SHARD, RECIPE, drop_half, write_lines, write_parquet, write_records
from cache_store import Cache, open_cache
from cache_store.cache.commit import make_seal, refuse_non_canonical, write_seal
from cache_store.cache.metadata import file_record, write_plan
from cache_store.cache.survey import survey, survey_build, survey_records, survey_without_reading_plan
from cache_store.format.layout import PLAN_FILE
from cache_store.format.schema import FileRecord
from cache_store.program.running import run_program
from cache_store.storage.local import LocalStore
from cache_store.verify.verify import verify
from precompute.rerun.decide import decide, decide_planned
from precompute.rerun.facts import compare_lists, known_plans, planned_facts, unchanged_rows
from precompute.rerun.images import compare_images
from precompute.rerun.request import BuildRequest
from precompute.rerun.source_plan import make_plan
from precompute.sources import SourceConfig, open_source

BATCH = 256
BATCHES = 20
PACKAGES = ("numpy", "pyarrow", "msgspec", "encode-once")


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.scale", run, argv)


def run(argv: Sequence[str]) -> int:
    parser = option_parser()
    options = parser.parse_args(argv)
    if options.step and not options.folder:
        parser.error("--step measures a cache in --folder; name it")
    if options.step:
        print(json.dumps(measured(options.step, Path(options.folder))))
        return 0
    results = {}
    for samples in options.samples:
        with tempfile.TemporaryDirectory(prefix="scale-", dir=options.folder) as folder:
            results[samples] = steps_of(Path(folder), samples, planned=samples <= options.planned)
    print_table(results)
    print_record("scale", PACKAGES, options=vars(options), samples_per_shard=PER_SHARD, results=results)
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = parser_with(__doc__, "folder")
    parser.add_argument(
        "--samples", type=positive_int, nargs="+", default=[10**5, 10**6], help="one cache of each size"
    )
    parser.add_argument(
        "--planned",
        type=int,
        default=10**7,
        help="caches larger than this get no plan; only steps that need none are measured",
    )
    parser.add_argument("--step", choices=STEPS, help="measure one step of the cache in --folder")
    return parser


def steps_of(folder: Path, samples: int, *, planned: bool) -> dict[str, dict[str, float]]:
    """Measure every step, each in its own process, in the order of a cache's making."""
    results, cache = {}, folder / "cache"
    if planned:
        write_parquet(folder / "list.parquet", samples)
        results["plan-parquet"] = in_process("plan-parquet", folder)
        (folder / "list.parquet").unlink()
        write_lines(folder / "list.jsonl", samples)
        results["plan-lines"] = in_process("plan-lines", folder)
        (folder / "list.jsonl").unlink()
    cache.mkdir(exist_ok=True)
    write_records(cache, samples)
    results |= {step: in_process(step, folder) for step in ("seal", "open", "map", "read", "quick")}
    if planned:
        results["rerun"] = in_process("rerun", folder)
        drop_half(cache)
        results |= {step: in_process(step, folder) for step in ("rerun-half", "rank-half")}
    return results


def in_process(step: str, folder: Path) -> dict[str, float]:
    """Measure a step in a new process."""
    command = [sys.executable, "-m", "benchmarks.scale", "--step", step, "--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{folder.name} {step}: {result}", file=sys.stderr, flush=True)
    return result


def measured(step: str, folder: Path) -> dict[str, float]:
    work = STEPS[step](folder)
    before, start, cpu = peak_mib(), time.perf_counter(), time.process_time()
    work()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    times = {"seconds": round(seconds, 3), "cpu_seconds": round(cpu_seconds, 3)}
    memory = {"peak_mib": peak_mib(), "peak_mib_before": before, "own_mib_after": status_mib("RssAnon")}
    return {**times, **memory}


def peak_mib() -> float:
    """Return this process's own peak resident size in MiB; `ru_maxrss` may be that of its parent.

    It includes pages of mapped files, 64 KiB around each place read, which the system drops when it needs memory.
    """
    return status_mib("VmHWM")


def status_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(round(int(line.split()[1]) / 1024, 1) for line in lines if line.startswith(field))


def planning(kind: str, name: str) -> Callable[[Path], Callable[[], object]]:
    """List the samples and write the plan."""

    def prepare(folder: Path) -> Callable[[], object]:
        path, images = str(folder / name), {"images": str(folder)} if kind == "llava" else {}
        source = open_source(SourceConfig(kind=kind, path=path, **images))  # type: ignore[arg-type]
        return lambda: write_plan(LocalStore(folder / "cache"), make_plan(source.samples(), PER_SHARD).shards())

    return prepare


def sealing(folder: Path) -> Callable[[], object]:
    store = LocalStore(folder / "cache")

    def work() -> None:
        found = survey_records(store)
        assert found.spec.value is not None
        contents = [record.content for _, record in sorted(found.records.items())]
        refuse_non_canonical(store, contents)
        plan = FileRecord(path=PLAN_FILE, bytes=0, sha256="0" * 64)
        plan = file_record(store, PLAN_FILE) if store.has(PLAN_FILE) else plan
        write_seal(store, make_seal(found.spec.value, contents, plan), None)

    return work


def opening(folder: Path) -> Callable[[], object]:
    return lambda: open_cache(folder / "cache")


def mapping(folder: Path) -> Callable[[], object]:
    """Look up a sample of every shard, as an epoch's first batches do."""
    cache = open_cache(folder / "cache")
    return lambda: map_all(cache)


def map_all(cache: Cache) -> None:
    for shard in range(cache.spec.num_shards):
        cache.shards.mapped(shard)


def reading(folder: Path) -> Callable[[], object]:
    """Read twenty random batches, after all shards were looked up and twenty other batches were read."""
    cache, rng = open_cache(folder / "cache"), np.random.default_rng(0)
    map_all(cache)

    def work() -> None:
        for _ in range(BATCHES):
            cache.read(rng.integers(len(cache), size=BATCH), check=False)

    work()
    return work


def verifying(folder: Path) -> Callable[[], object]:
    return lambda: verify(folder / "cache", "quick")


def rerunning(folder: Path) -> Callable[[], object]:
    """Decide what to build, as a rerun with an unchanged source does."""
    store, request = LocalStore(folder / "cache"), BuildRequest()
    source = open_source(SourceConfig(kind="folder", path=str(folder / "cache")))

    def work() -> None:
        build = survey_build(store)
        surveyed = survey(store, known_plans(build.value, None), build)
        rows = unchanged_rows(surveyed)
        assert rows is not None
        decided = decide(compare_lists(surveyed, RECIPE, rows), request)
        compare_images(surveyed, decided, source, request, 1)

    return work


def running_again_as_rank(folder: Path) -> Callable[[], object]:
    """Decide what is left of the plan, as each rank does; it lists no source."""
    cache = folder / "cache"
    return lambda: decide_planned(planned_facts(survey_without_reading_plan(cache), RECIPE), BuildRequest())


STEPS: dict[str, Callable[[Path], Callable[[], object]]] = {
    "plan-parquet": planning("parquet", "list.parquet"),
    "plan-lines": planning("llava", "list.jsonl"),
    "seal": sealing,
    "open": opening,
    "map": mapping,
    "read": reading,
    "quick": verifying,
    "rerun": rerunning,
    "rerun-half": rerunning,
    "rank-half": running_again_as_rank,
}
"""For each step, the function that prepares it and returns the work to time."""


def print_table(results: dict[int, dict[str, dict[str, float]]]) -> None:
    print(f"{'':<16}" + "".join(f"{samples:>24,}" for samples in results))
    for step in STEPS:
        cells = (each.get(step) for each in results.values())
        shown = (f"{cell['cpu_seconds']:.2f} s {cell['peak_mib']:,.0f} MiB" if cell else "" for cell in cells)
        print(f"{step:<16}" + "".join(f"{cell:>24}" for cell in shown))


if __name__ == "__main__":
    sys.exit(main())
