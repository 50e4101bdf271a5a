"""Find files in a cache's folders that are not the cache's, and delete those that dead builds left."""

from collections.abc import Iterator

from cache_store.format.formats import shard_format
from cache_store.format.names import BUILD_FILE, PLAN_FILE, SEAL_FILE, commit_file, samples_file
from cache_store.format.schema import Spec
from cache_store.storage.files import SCRATCH_SUFFIX, scratch_of
from cache_store.storage.store import Store, listed_once
from cache_store.verify.findings import Finding

STRAY, LEFTOVER = "does not belong here", "left by a build that died"


def stray(file: str, problem: str = STRAY) -> Finding:
    return Finding(file=file, problem=problem, kind="stray")


def stray_findings(store: Store, spec: Spec) -> Iterator[Finding]:
    """Yield files in the cache's folders that are not the cache's, including scratch files of dead builds."""
    known = files_of(spec)
    for name in store.list():
        if name.startswith(".") and name.endswith(SCRATCH_SUFFIX):
            yield stray(name, LEFTOVER if is_leftover(name, known) else STRAY)
    folders = {folder for name in known for folder in folders_above(name)}
    for top in sorted(name for name in folders if "/" not in name):
        yield from strays_below(store, top, known, folders)


def clear_leftovers(store: Store, spec: Spec) -> None:
    """Delete scratch files of dead builds; only the holder of the claim may call it, while it writes nothing.

    On a disk, every folder with files of the cache is listed once: in the Zarr form, one folder per shard.
    """
    known, there = files_of(spec), listed_once(store)
    for folder in sorted({name.rpartition("/")[0] for name in known}):
        for name in there.list(folder):
            if is_leftover(whole := f"{folder}/{name}".lstrip("/"), known):
                store.delete(whole)


def files_of(spec: Spec) -> set[str]:
    """Return the names of all files of a cache with this spec."""
    shards, layout = range(spec.num_shards), shard_format(spec)
    by_shard = (name(shard) for name in (samples_file, commit_file, layout.shard_file) for shard in shards)
    return {PLAN_FILE, BUILD_FILE, SEAL_FILE, *layout.metadata(), *by_shard}


def is_leftover(name: str, known: set[str]) -> bool:
    """Whether `name` is the scratch file of a `known` file of the cache."""
    folder, slash, base = name.rpartition("/")
    written = scratch_of(base)
    return written is not None and folder + slash + written in known


def folders_above(name: str) -> Iterator[str]:
    while name := name.rpartition("/")[0]:
        yield name


def strays_below(store: Store, folder: str, known: set[str], folders: set[str]) -> Iterator[Finding]:
    """Yield stray files below a folder; names stay strings, since a large cache has hundreds of thousands.

    A missing folder gives nothing here: other checks report each of its files as missing.
    """
    try:
        entries = store.list(folder)
    except NotADirectoryError:
        yield stray(folder)
        return
    for entry in entries:
        name = f"{folder}/{entry}".rstrip("/")
        if entry.endswith("/"):
            inner = [*strays_below(store, name, known, folders)]
            yield from inner or ([] if name in folders or name in known else [stray(name)])
        elif name not in known:
            yield stray(name, LEFTOVER if is_leftover(name, known) else STRAY)
