"""Turning a cache into one of more rows, so that a kill at any instant leaves what a rerun goes on from.

The plan comes first: from then on any build, asked to extend or not, sees that an extension has begun. The spec comes
last: once it is there, the cache is an unfinished one of more rows. Every step can be done twice.
"""

from pathlib import Path

from cache_store.cache.metadata import write_build, write_spec
from cache_store.format.schema import Spec, commit_file
from cache_store.storage.publish import withdraw
from precompute.config import BuildConfig
from precompute.encode.progress import say
from precompute.resume.kept import unseal, write_plan_of
from precompute.resume.sample_list import SampleList


def extend(root: Path, config: BuildConfig, samples: SampleList, spec: Spec) -> None:
    """Give the cache the rows of `spec`; its shards are kept, but for the last one where that was not full."""
    announce(samples, spec)
    write_plan_of(root, spec, samples.to_write)
    unseal(root)
    if samples.open_shard is not None:
        withdraw(root / commit_file(samples.open_shard))
    write_build(root, config.recorded())
    write_spec(root, spec)


def announce(samples: SampleList, spec: Spec) -> None:
    before, shard = samples.cached.rows, samples.open_shard
    full = before // spec.samples_per_shard
    kept = f"; shards [0, {full:,}) are full and kept" if full else ""
    again = "" if shard is None else f"; shard {shard}, partly filled so far, is written again"
    say(f"extending from {before:,} to {spec.rows:,} samples{kept}{again}")
