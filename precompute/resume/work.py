"""What a cache holds compared with what is asked of it, before anything is written, and what is left to do then."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from cache_store.cache.metadata import write_build, write_spec
from cache_store.errors import ConfigError
from cache_store.format.schema import PLAN_FILE, CommitRecord, Seal, Spec
from precompute.config import BuildConfig
from precompute.encode.progress import say
from precompute.resume.examine import examine_images
from precompute.resume.expected import Expected, expected_shards
from precompute.resume.extend import extend
from precompute.resume.kept import find_shards, restore_metadata, sort_shards, sound_seal, write_plan_of
from precompute.resume.request import Acts
from precompute.resume.retry import Retry, try_rejected
from precompute.resume.sample_list import MakeSpec, SampleList, arrange
from precompute.resume.stale import refuse_other_spec
from precompute.sources import Source


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is left to do, once everything has been compared and the cache's metadata stands."""

    spec: Spec
    kept: list[CommitRecord]
    """Of the shards that need no work."""
    damaged: dict[int, str] = field(default_factory=dict)
    """What is the matter with shards that were committed once."""
    expected: Expected = field(default_factory=dict)
    """What shards must come out as that hold the samples they held."""
    earlier_seal: Seal | None = None
    """Of the cache, where it was sealed."""
    new_samples: int = 0
    retry: Retry | None = None

    @property
    def samples_differ(self) -> bool:
        """Whether the cache becomes another one, on purpose."""
        return bool(self.new_samples or (self.retry and self.retry.rejected_before))

    @property
    def missing(self) -> list[int]:
        """The shards to build."""
        kept = {record.content.shard for record in self.kept}
        return [shard for shard in range(self.spec.num_shards) if shard not in kept]


def begin(config: BuildConfig, spec: Spec, found: pa.Table) -> Work:
    """Write a new cache's metadata."""
    write_build(config.root, config.recorded())
    write_plan_of(config.root, spec, found)
    write_spec(config.root, spec)
    return Work(spec=spec, kept=[])


def go_on(config: BuildConfig, make_spec: MakeSpec, source: Source, found: pa.Table, acts: Acts) -> Work:
    """Compare the cache with what is asked, all of it, before its metadata is mended or extended."""
    root, threads = config.root, config.run.threads(1)
    samples = arrange(config, found, make_spec, acts)
    spec = make_spec(samples.plan)
    refuse_other_spec(root, samples.cached, spec, acts)
    refuse_unknown_shards(root, spec, acts.rebuild)
    work = what_is_left(root, spec, samples, source, acts, threads)
    again = set(work.missing) - {samples.open_shard}
    examine_images(root, samples, source, acts, again=again, expected=work.expected, threads=threads)
    for shard, problem in work.damaged.items():
        say(f"damage found, shard {shard} is built again: {problem}")
    mend_or_extend(config, samples, spec)
    return work


def what_is_left(root: Path, spec: Spec, samples: SampleList, source: Source, acts: Acts, threads: int) -> Work:
    """Sort the shards; one whose samples stay the same is held to what it was, by a build as by a repair."""
    seal, shards = sound_seal(root), find_shards(root, spec, samples.plan, without=samples.open_shard)
    expected = expected_shards(spec, seal, shards)
    kept = sort_shards(shards, expected)
    recipe = spec.array.image
    retry = try_rejected(root, kept.records, source, recipe, threads) if acts.retry_rejected else None
    recovered = retry.rejected_before if retry else {}
    again = {*acts.rebuild, *recovered}
    return Work(
        spec=spec,
        kept=[record for record in kept.records if record.content.shard not in again],
        damaged=kept.damaged,
        expected={shard: digests for shard, digests in expected.items() if shard not in recovered},
        earlier_seal=seal,
        new_samples=spec.rows - samples.cached.rows,
        retry=retry,
    )


def mend_or_extend(config: BuildConfig, samples: SampleList, spec: Spec) -> None:
    """Bring the metadata, the plan among it, to what the spec says."""
    if samples.grows:
        extend(config.root, config, samples, spec)
        return
    restore_metadata(config.root, config, spec)
    if samples.begun:
        say(f"an extension that had only begun is undone: {PLAN_FILE} is written again")
    elif samples.fingerprints is None:
        say(f"damage found, {PLAN_FILE} is written again from the source")
    else:
        return
    write_plan_of(config.root, spec, samples.to_write)


def refuse_unknown_shards(root: Path, spec: Spec, shards: Collection[int]) -> None:
    if beyond := sorted(shard for shard in shards if not 0 <= shard < spec.num_shards):
        raise ConfigError(f"{root} has shards [0, {spec.num_shards}); it has no shard {beyond[0]}")
