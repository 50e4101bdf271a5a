"""Checking one file of a cache: whether it lies there, can be read, and has the size and hash of its record."""

import os
from pathlib import Path

from cache_store.errors import CacheError, NotAFileError
from cache_store.format.schema import FileRecord
from cache_store.storage.publish import file_sha256
from cache_store.storage.regular_file import NOT_A_FILE
from cache_store.verify.findings import Finding, Kind, Level


def file_finding(root: Path, file: FileRecord, level: Level, shard: int | None = None) -> Finding | None:
    """What is wrong with a file that a record names; but for level quick its SHA-256 is compared too."""
    path = root / file.path
    try:
        if absent := absence(root, file.path, shard):
            return absent
        if (size := path.stat().st_size) != file.bytes:
            problem = f"is {size} bytes, expected {file.bytes}"
        elif level != "quick" and (found := file_sha256(path)) != file.sha256:
            problem = f"sha256 is {found[:12]}…, expected {file.sha256[:12]}…"
        else:
            return None
    except OSError as error:
        return unreadable(error, root, file.path, shard)
    return Finding(shard=shard, file=file.path, problem=problem)


def absence(root: Path, file: str, shard: int | None) -> Finding | None:
    """What is wrong where no file lies."""
    path = root / file
    if path.is_file():
        return None
    if os.path.lexists(path):
        return Finding(shard=shard, file=file, problem=NOT_A_FILE, kind="replaced")
    return Finding(shard=shard, file=file, problem="is missing")


def unreadable(error: CacheError | OSError, root: Path, file: str, shard: int | None = None) -> Finding:
    """What whoever read a file ran into; a finding names the file itself."""
    if isinstance(error, OSError):
        problem = f"cannot be read: {error.strerror}"
    else:
        problem = str(error).removeprefix(f"{root / file} ")
    kind: Kind = "replaced" if isinstance(error, NotAFileError) else "damaged"
    return Finding(shard=shard, file=file, problem=problem, kind=kind)
