"""Checking the spec against what was made with it: plan, records and seal, and the metadata that it determines."""

import contextlib
from collections.abc import Iterator

from cache_store.cache.files import open_plan
from cache_store.cache.metadata import read_commit
from cache_store.errors import CacheError
from cache_store.format.formats import shard_format
from cache_store.format.schema import CommitRecord, Seal, Spec
from cache_store.storage.store import Store
from cache_store.verify.file import unreadable
from cache_store.verify.findings import Finding


def is_contradicted(store: Store, spec: Spec, seal: Seal | None) -> bool:
    """Whether the rest of the cache agrees on another spec, which is then at fault itself."""
    if seal is not None:
        return seal.spec_digest != spec.digest and not is_borne_out(store, spec)
    recipes = [record.content.recipe for record in readable_records(store, spec)]
    return len(recipes) > 1 and recipes[0] != spec.recipe and all(each == recipes[0] for each in recipes)


def is_borne_out(store: Store, spec: Spec) -> bool:
    """Whether plan and records speak for the spec, where the seal speaks against it."""
    try:
        plan = open_plan(store)
        if plan.num_rows != spec.rows or plan.digests()[0] != spec.plan_digest:
            return False
    except CacheError:
        pass  # then it says nothing
    first = next(readable_records(store, spec), None)
    return first is not None and first.content.recipe == spec.recipe


def readable_records(store: Store, spec: Spec) -> Iterator[CommitRecord]:
    for shard in range(spec.num_shards):
        with contextlib.suppress(CacheError, OSError):
            if record := read_commit(store, shard):
                yield record


def metadata_findings(store: Store, spec: Spec) -> Iterator[Finding]:
    for name, expected in shard_format(spec).metadata(spec).items():
        try:
            if store.read(name) != expected:
                yield Finding(file=name, problem="is not what the spec says it should be")
        except (CacheError, OSError) as error:
            yield unreadable(error, store, name)
