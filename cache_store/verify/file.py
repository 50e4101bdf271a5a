"""Checking one file of a cache: whether it lies there, can be read, and has the size and hash of its record."""

from cache_store.cache.files import refuse_other_size, stored_sha256
from cache_store.errors import CacheError, NotAFileError
from cache_store.format.schema import FileRecord
from cache_store.storage.store import Store
from cache_store.verify.findings import Finding, Kind, Level


def file_finding(store: Store, file: FileRecord, level: Level, shard: int | None = None) -> Finding | None:
    """What is wrong with a file that a record names; but for level quick its SHA-256 is compared too."""
    try:
        refuse_other_size(store, file)
        if level == "quick" or (found := stored_sha256(store, file.path)) == file.sha256:
            return None
    except (CacheError, OSError) as error:
        return unreadable(error, store, file.path, shard)
    problem = f"sha256 is {found[:12]}…, expected {file.sha256[:12]}…"
    return Finding(shard=shard, file=file.path, problem=problem)


def absence(store: Store, file: str, shard: int | None) -> Finding | None:
    """What is wrong where no file lies."""
    try:
        store.size(file)
    except (CacheError, OSError) as error:
        return unreadable(error, store, file, shard)
    return None


def unreadable(error: CacheError | OSError, store: Store, file: str, shard: int | None = None) -> Finding:
    """What whoever read a file ran into; a finding names the file itself."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        problem = "is missing"
    elif isinstance(error, OSError):
        problem = f"cannot be read: {error.strerror}"
    else:
        problem = str(error).removeprefix(f"{store.where(file)} ")
    kind: Kind = "replaced" if isinstance(error, NotAFileError) else "damaged"
    return Finding(shard=shard, file=file, problem=problem, kind=kind)
