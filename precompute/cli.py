"""`precompute`: from images to a sealed cache of latents."""

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from cache_store.errors import ConfigError
from cache_store.log import log_about, log_result
from cache_store.messages import counted
from cache_store.program.command_line import CACHE, Command, Program, drop_options
from cache_store.program.output_file import json_report
from precompute.build.request import BuildRequest
from precompute.config import (
    AuditConfig,
    BuildConfig,
    CaptionsConfig,
    DecodedGalleryConfig,
    EstimateConfig,
    RepairConfig,
)
from precompute.encode.rank import find_rank
from precompute.encoders.registry import help_lines
from precompute.texts_config import TextsConfig, preset_lines, write_configs

EXAMPLES = """\
  precompute estimate --config my.yaml                hours, bytes, does it pay?
  precompute build --print-config > my.yaml           a complete config to edit
  precompute build --config my.yaml                   run again to resume
  precompute build --config my.yaml --store.codec zstd --cache data/cc3m-zstd
  precompute build --config my.yaml --extend          the sample list has grown
  precompute build --config my.yaml --retry-rejected  images are back or fixed
  precompute build --config my.yaml --check-sources   did any image change?
  precompute plan --config my.yaml                    on many machines: 1. plan
  srun precompute build --config my.yaml              2. run every rank
  precompute seal --config my.yaml                    3. seal
  precompute texts --source data/cc3m --cache data/text --of SDXL --model M
  precompute captions data/cc3m                       the captions have changed
  precompute repair data/cc3m --report report.json    rebuild damaged shards
  precompute audit data/cc3m --samples 1000           encode some again, compare
  precompute gallery data/cc3m --decode               look at it
"""


ONCE = {
    "--extend": "Add samples that are new in the source, as new shards; the others stay as they are.",
    "--retry-rejected": "Try rejected samples again; rebuild the shards in which one can be decoded now.",
    "--check-sources": "Read every image again, not only those that look changed, and compare it with the encoded one.",
}
"""Flags for a single run of `build` or `plan`; they are not config fields."""

RANKS = {
    "--rank R": "Number of this process, from 0, among N that build one planned cache: it builds only its own shards "
    "and does not seal. Default: as torchrun, srun, a Slurm array or an Indexed Job of Kubernetes says.",
    "--world-size N": "Number of processes, N; 1 means a single-process build, also under a launcher.",
}

PLAN_RANKS = {
    "--rank R": "Number of this process, from 0, among N that plan one new cache at the same time: it plans only its "
    "own parts, of tars, Parquet files, a tree of images or another cache. Then run the same command without a rank.",
    "--world-size N": "Number of processes, N.",
}

TEXT_OPTIONS = {
    "--extend": "Add samples that are new in that cache, as new shards; the others stay as they are.",
    "--configs FOLDER": "Only write the config of each build, NAME.yaml, into this folder: to edit it, or to split a "
    "build among ranks.",
}
"""Options of `texts` that are not config fields."""


def build_command(arguments: Any) -> int:
    """Plan, encode and seal a cache; run again to resume."""
    config = arguments.config.prepared()
    rank = find_rank(arguments.rank, arguments.world_size, os.environ)
    if rank is not None and config.run.engine == "ray":
        raise ConfigError(
            f"run.engine ray starts its own workers, so it cannot run as {rank}: leave out --rank and --world-size "
            "(under a launcher, give --rank 0 --world-size 1), or use --run.engine local"
        )
    refuse_unfit_size(config)
    if rank is None:
        from precompute.build.steps import build  # torch takes seconds to import

        show(build(config, request_of(arguments)), config.cache)
        return 0
    for option in (name for name in ONCE if getattr(arguments, name.removeprefix("--").replace("-", "_"))):
        raise ConfigError(f"{option} belongs to `precompute plan`, before the ranks build; this process is {rank}")
    from precompute.build.steps import build_rank

    request = step_request(arguments)
    log_about(rank=rank.index, world_size=rank.world_size)
    encoded = build_rank(config, request, rank)
    log_result(f"{rank} {encoded}", build=asdict(encoded))
    print(f"{rank} {encoded}" if encoded.shards else f"{rank}: nothing to encode; all its shards are committed")
    print(f"next, when all ranks have finished: {request.other_command('seal')}")
    return 0


def plan_command(arguments: Any) -> int:
    """Plan a cache for ranks to build; run again to extend it or to retry rejected samples."""
    config, request = arguments.config.prepared(), request_of(arguments)
    refuse_unfit_size(config)
    from precompute.build.steps import plan_for_ranks, plan_rank

    if rank := find_rank(arguments.rank, arguments.world_size, {}):
        parts = plan_rank(config, step_request(arguments), rank)
        print(f"{rank} planned {counted(len(parts), 'part')} of {config.cache}")
        print(f"next, when all ranks have finished: {step_request(arguments).other_command('plan')}")
        return 0
    work = plan_for_ranks(config, request)
    spec, steps = work.spec, step_request(arguments)
    print(f"planned {config.cache}: {counted(spec.rows, 'sample')} in {counted(spec.num_shards, 'shard')}")
    if work.to_build:
        print(f"next: {steps.other_command('build')} --rank R --world-size N, for each R from 0 to N - 1")
    else:
        print(f"nothing to encode: all shards are committed; next: {steps.other_command('seal')}")
    return 0


def seal_command(arguments: Any) -> int:
    """Seal a cache that ranks have built; if shards are missing, name them and exit 1."""
    config = arguments.config.prepared()
    from precompute.build.steps import seal_after_ranks

    show(seal_after_ranks(config, step_request(arguments)), config.cache)
    return 0


def texts_command(arguments: Any) -> int:
    """Encode the captions of a cache's samples with each text encoder of a model; run again to resume."""
    builds = arguments.config.builds
    if arguments.configs is not None:
        for path in write_configs(builds, Path(arguments.configs)):
            print(f"next: precompute build --config {shlex.quote(str(path))}, or plan, ranks and seal")
        return 0
    if rank := find_rank(None, None, os.environ):
        raise ConfigError(
            f"`precompute texts` is one process, and this is {rank}: write the configs of its builds with --configs "
            "FOLDER, then plan, build and seal each"
        )
    from precompute.encoders.registry import refuse_other_class, usable_files

    for name, config in builds.items():
        files = usable_files(config.encoder)
        if files is not None and arguments.config.of is not None:
            refuse_other_class(arguments.config.of, name, files)
    from precompute.build.steps import build

    new_samples: Literal["append", "refuse"] = "append" if arguments.extend else "refuse"
    request = BuildRequest(new_samples=new_samples, command=("precompute", *arguments.argv))
    for config in builds.values():
        print(f"{config.cache}:", flush=True)
        show(build(config, request), config.cache)
    return 0


def refuse_unfit_size(config: BuildConfig | EstimateConfig) -> None:
    """Raise ConfigError for an image size that the encoder does not take, before torch is imported."""
    from precompute.encoders.registry import refuse_image_size, usable_files

    usable_files(config.encoder)  # so that no other mistake is blamed on the size
    buckets = config.image.buckets
    try:
        for _, height, width in config.example_sizes:
            refuse_image_size(config.encoder, height, width)
    except ConfigError as error:
        if not config.image.has_buckets:
            raise
        named = "sizes do" if buckets.sizes else f"step {buckets.rule.step} does"
        raise ConfigError(f"image.buckets.{named} not suit the encoder: {error}") from None


def request_of(arguments: Any) -> BuildRequest:
    return BuildRequest(
        new_samples="append" if arguments.extend else "refuse",
        retry_rejected=arguments.retry_rejected,
        check_sources=arguments.check_sources,
        command=("precompute", *arguments.argv),
    )


def step_request(arguments: Any) -> BuildRequest:
    """Make the request for a rank or a `seal`; its messages suggest `precompute plan` with the same config."""
    options = drop_options(arguments.argv[1:], ("--rank", "--world-size"), ONCE)
    return BuildRequest(command=("precompute", "plan", *options))


def captions_command(arguments: Any) -> int:
    """Read the texts of a cache's samples again; every latent stays."""
    from precompute.captions import take_captions

    done = take_captions(arguments.cache, arguments.config)
    names = f" ({done.changed})" if done.changed.total else ""
    print(f"other texts for {counted(done.changed.total, 'sample')}{names}; every latent stays")
    if done.kept:
        print(f"{counted(done.kept, 'sample')} that the source lacks kept their texts")
    if done.extra:
        print(f"columns: {', '.join(done.extra)}")
    log_result(f"read the texts of {arguments.cache}", captions={"changed": done.changed.total, "shards": done.shards})
    if done.shards:
        print(f"next: the `precompute build` of this cache, which encodes {counted(done.shards, 'shard')} again")
    return 0


def estimate_command(arguments: Any) -> int:
    """Measure how long a build would take here and when its cache pays off; exit 1 if it would not fit."""
    config = arguments.config.prepared()
    refuse_unfit_size(config)
    from precompute.estimate import estimate_lines, measure

    found = measure(config)
    print(*estimate_lines(config, found), sep="\n")
    return 0 if found.fits else 1


def repair_command(arguments: Any) -> int:
    """Rebuild damaged shards to the same bytes, and reseal."""
    from precompute.repair import repair

    show(repair(arguments.cache, arguments.config), arguments.cache)
    return 0


def audit_command(arguments: Any) -> int:
    """Encode a random draw of a cache's samples again and compare; exit 1 if any differs or its image changed."""
    from precompute.audit import audit

    config = arguments.config

    def failed(error: str) -> dict[str, object]:
        return {"sound": False, "error": error, "cache": arguments.cache, "identity": None, "findings": [], "next": []}

    with json_report("precompute audit", config.report, arguments.cache, failed) as fields:
        report = audit(arguments.cache, config)
        fields.update(report.as_dict())
        print(*report.lines(), sep="\n")
    return 1 if report.findings else 0


def gallery_command(arguments: Any) -> int:
    """Show rows of a cache on one HTML page; with --decode, beside the images that the VAE decodes."""
    from cache_store.gallery.gallery import print_gallery
    from precompute.gallery import gallery

    print_gallery(gallery(arguments.cache, arguments.config))
    return 0


def show(summary: Any, cache: str) -> None:
    """Print the build's summary: counts, cache identity and the next command."""
    seal = summary.seal
    encoded = summary.encoded
    print(str(encoded) if encoded.shards else "nothing to encode: all shards are committed")
    if summary.num_retried:
        print(f"recovered {summary.recovered:,} of {summary.num_retried:,} rejected samples tried again")
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(seal.reasons.items()))
    why = f" ({reasons})" if reasons else ""
    print(f"{seal.spec.rows:,} planned = {seal.cached:,} cached + {seal.rejected:,} rejected{why}")
    if seal.cut_texts:
        print(f"cut {counted(seal.cut_texts, 'text')} longer than encoder.max_tokens")
    for remark, number in sorted(seal.remarks.items()):
        what, _, effect = remark.partition(", ")
        print(f"{what} in {counted(number, f'cached {seal.spec.array.made_of}')}, {effect}")
    print(f"sealed {cache}: {seal.array.bytes:,} bytes of samples, cache identity {seal.identity}")
    counts = {name: getattr(seal, name) for name in ("cached", "rejected", "reasons", "identity")}
    built = {"rows": seal.spec.rows, **counts, "bytes": seal.array.bytes, **asdict(encoded)}
    log_result(f"sealed {cache}: {counted(seal.cached, 'sample')}", build=built)
    print(f"next: cache-store verify {shlex.quote(cache)} --level full")


CLASSES = "\n".join(["families of encoder.model, each named by its first class:", *help_lines()])

TEXTS = "\n".join(["models of `of`, each with the names of its caches:", *preset_lines()])

COMMANDS = {
    "estimate": Command(estimate_command, EstimateConfig, epilog=CLASSES),
    "build": Command(build_command, BuildConfig, options=ONCE | RANKS, epilog=CLASSES),
    "plan": Command(plan_command, BuildConfig, options=ONCE | PLAN_RANKS, fields_of="precompute build"),
    "seal": Command(seal_command, BuildConfig, fields_of="precompute build"),
    "texts": Command(texts_command, TextsConfig, options=TEXT_OPTIONS, epilog=TEXTS),
    "captions": Command(captions_command, CaptionsConfig, CACHE),
    "repair": Command(repair_command, RepairConfig, CACHE),
    "audit": Command(audit_command, AuditConfig, CACHE),
    "gallery": Command(gallery_command, DecodedGalleryConfig, CACHE),
}

PROGRAM = Program("precompute", "Encode every image once, with a frozen encoder, into a cache.", EXAMPLES, COMMANDS)
main = PROGRAM.main
