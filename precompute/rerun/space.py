"""Is there room for a cache where it is to lie?

A build is refused only where it certainly cannot fit: samples without compression, less those that may be rejected, are
more than the file system says is free. Quotas that it does not tell of show as a full disk, later.
"""

import shutil
from pathlib import Path

from cache_store.errors import EncodeOnceError
from cache_store.storage.local import LocalStore
from cache_store.storage.store import Store
from precompute.config import BuildConfig
from precompute.rerun.decide import Work

UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "KB": 1e3}


class NoSpaceError(EncodeOnceError):
    """A cache is larger than the space that is free for it."""


def shown_bytes(count: float) -> str:
    """As `14.9 GB`."""
    for unit, size in UNITS.items():
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} bytes"


def free_bytes(store: Store) -> int | None:
    """What the file system grants the user at a cache's place; None where it does not say, or it is no folder."""
    if not isinstance(store, LocalStore):
        return None
    place = next((each for each in (store.root, *store.root.absolute().parents) if each.is_dir()), Path("/"))
    try:
        usage = shutil.disk_usage(place)
    except OSError:  # some network file systems
        return None
    return usage.free if usage.total else None


def certain_bytes(work: Work, max_reject_fraction: float) -> float:
    """At least so many will be written that are not there yet; 0 where a codec decides, or shards replace others."""
    if work.spec.array.codec != "none" or work.kept or work.allowed_digests:
        return 0.0
    return work.spec.rows * (1.0 - max_reject_fraction) * work.spec.array.sample_bytes


def refuse_little_space(config: BuildConfig, store: Store, work: Work) -> None:
    """NoSpaceError, before anything is written, where a new cache cannot fit."""
    needed, free = certain_bytes(work, config.run.max_reject_fraction), free_bytes(store)
    if config.run.check_space and free is not None and needed > free:
        raise NoSpaceError(
            f"{store} needs {shown_bytes(needed)} for its latents at least, and {shown_bytes(free)} are free there; "
            "make room or name another place with --cache. Where the file system compresses, or grows as it is filled, "
            "go on with --run.check_space false"
        )
