"""What lies in a cache's folders and is no file of the cache: found, and where builds that died left it, cleared."""

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
    """What lies in the cache's folders and is no file of a cache, scratch files of a build that died among them."""
    known = files_of(spec)
    for name in store.list():
        if name.startswith(".") and name.endswith(SCRATCH_SUFFIX):
            yield stray(name, LEFTOVER if is_leftover(name, known) else STRAY)
    folders = {folder for name in known for folder in folders_above(name)}
    for top in sorted(name for name in folders if "/" not in name):
        yield from strays_below(store, top, known, folders)


def clear_leftovers(store: Store, spec: Spec) -> None:
    """Delete the scratch files of builds that died; for the holder of the claim, and when it writes nothing itself.

    On a disk, each folder that has files of the cache is listed once: as many as shards, in the Zarr form.
    """
    known, there = files_of(spec), listed_once(store)
    for folder in sorted({name.rpartition("/")[0] for name in known}):
        for name in there.list(folder):
            if is_leftover(whole := f"{folder}/{name}".lstrip("/"), known):
                store.delete(whole)


def files_of(spec: Spec) -> set[str]:
    """The names of all files that a cache of this spec has."""
    shards, layout = range(spec.num_shards), shard_format(spec)
    by_shard = (name(shard) for name in (samples_file, commit_file, layout.shard_file) for shard in shards)
    return {PLAN_FILE, BUILD_FILE, SEAL_FILE, *layout.metadata(), *by_shard}


def is_leftover(name: str, known: set[str]) -> bool:
    """Whether a name is that of the scratch of one of the cache's `known` files."""
    folder, slash, base = name.rpartition("/")
    written = scratch_of(base)
    return written is not None and folder + slash + written in known


def folders_above(name: str) -> Iterator[str]:
    while name := name.rpartition("/")[0]:
        yield name


def strays_below(store: Store, folder: str, known: set[str], folders: set[str]) -> Iterator[Finding]:
    """Names as strings throughout: a large cache has hundreds of thousands of them.

    Of a folder that is missing, the files that should be in it are missed one by one.
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
