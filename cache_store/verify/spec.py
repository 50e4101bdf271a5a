"""Checking the spec against what was made with it: plan, records and seal, and the metadata that it determines."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from cache_store.cache.metadata import read_commit
from cache_store.errors import CacheError
from cache_store.format.formats import shard_format
from cache_store.format.plan import PlanFile
from cache_store.format.schema import CommitRecord, Seal, Spec
from cache_store.storage.regular_file import read_regular
from cache_store.verify.file import unreadable
from cache_store.verify.findings import Finding


def is_contradicted(root: Path, spec: Spec, seal: Seal | None) -> bool:
    """Whether the rest of the cache agrees on another spec, which is then at fault itself."""
    if seal is not None:
        return seal.spec_digest != spec.digest and not is_borne_out(root, spec)
    recipes = [record.content.recipe for record in readable_records(root, spec)]
    return len(recipes) > 1 and recipes[0] != spec.recipe and all(each == recipes[0] for each in recipes)


def is_borne_out(root: Path, spec: Spec) -> bool:
    """Whether plan and records speak for the spec, where the seal speaks against it."""
    try:
        plan = PlanFile(root)
        if plan.num_rows != spec.rows or plan.digests()[0] != spec.plan_digest:
            return False
    except CacheError:
        pass  # then it says nothing
    first = next(readable_records(root, spec), None)
    return first is not None and first.content.recipe == spec.recipe


def readable_records(root: Path, spec: Spec) -> Iterator[CommitRecord]:
    for shard in range(spec.num_shards):
        with contextlib.suppress(CacheError, OSError):
            if record := read_commit(root, shard):
                yield record


def metadata_findings(root: Path, spec: Spec) -> Iterator[Finding]:
    for name, expected in shard_format(spec).metadata(spec).items():
        try:
            if read_regular(root / name) != expected:
                yield Finding(file=name, problem="is not what the spec says it should be")
        except (FileNotFoundError, NotADirectoryError):
            yield Finding(file=name, problem="is missing")
        except (CacheError, OSError) as error:
            yield unreadable(error, root, name)
