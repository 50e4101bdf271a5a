"""Seal a cache: combine every shard's record into one seal."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

from cache_store.errors import CacheError
from cache_store.format.names import SEAL_FILE, commit_file
from cache_store.format.record import FORMAT_VERSION, canonical_json, signed
from cache_store.format.schema import CommitContent, FileRecord, Seal, Spec
from cache_store.format.sums import summarise
from cache_store.storage.store import Store


def write_seal(store: Store, seal: Seal, held: Seal | None) -> Seal:
    """Write the seal, unless the cache holds it already."""
    if seal != held or not store.has(SEAL_FILE):
        store.put_whole(SEAL_FILE, canonical_json(seal))
    return seal


def cache_identity(contents: Iterable[CommitContent]) -> str:
    """Hash the digests of every commit record's content, in shard order (SHA-256)."""
    return hashlib.sha256("".join(each.digest for each in contents).encode()).hexdigest()


def refuse_non_canonical(store: Store, contents: Iterable[CommitContent]) -> None:
    """Raise CacheError for a record that is not canonical JSON: its digest is then not that of its contents."""
    for content in contents:
        if not content.is_canonical:
            name = store.where(commit_file(content.shard))
            raise CacheError(f"{name} is not canonical JSON (RFC 8785): delete it and run the same command again")


def make_seal(spec: Spec, contents: Sequence[CommitContent], plan_file: FileRecord) -> Seal:
    cached, rejected = sum(each.cached for each in contents), sum(each.rejected for each in contents)
    assert cached + rejected == spec.rows, (cached, rejected, spec.rows)
    reasons: Counter[str] = Counter()
    for each in contents:
        reasons.update(each.reasons)
    statistics = [each.statistics for each in contents if each.statistics is not None]
    if not statistics:
        raise CacheError("every sample was rejected, so there is nothing to seal")
    previews = [each.preview for each in contents if each.preview is not None]
    seal = Seal(
        format_version=FORMAT_VERSION,
        recipe=spec.recipe,
        spec_digest=spec.digest,
        identity=cache_identity(contents),
        planned=spec.rows,
        cached=cached,
        rejected=rejected,
        reasons=dict(reasons),
        unreadable_exif=sum(each.unreadable_exif for each in contents),
        cut_texts=sum(each.cut_texts for each in contents),
        cached_per_shard=tuple(each.cached for each in contents),
        commits=tuple(each.digest for each in contents),
        plan_file=plan_file,
        array=summarise(statistics, previews, sum(each.files[0].bytes for each in contents)),
        sha256="",
    )
    return signed(seal)
