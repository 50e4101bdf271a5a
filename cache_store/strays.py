"""Finding what lies in a cache's folders and is no file of the cache."""

import os
from collections.abc import Iterator
from pathlib import Path

from cache_store.findings import Finding
from cache_store.formats import shard_format
from cache_store.publish import SCRATCH_SUFFIX
from cache_store.schema import Spec, commit_file, samples_file

STRAY, LEFTOVER = "does not belong here", "left by a build that died"


def stray(file: str, problem: str = STRAY) -> Finding:
    return Finding(file=file, problem=problem, kind="stray")


def stray_findings(root: Path, spec: Spec) -> Iterator[Finding]:
    """What lies in the cache's folders and is no file of a cache, scratch files of a build that died among them."""
    shards = range(spec.num_shards)
    layout = shard_format(spec)
    known = {*layout.metadata(spec), *map(samples_file, shards)}
    for array in spec.arrays:
        known.update(commit_file(array, shard) for shard in shards)
        known.update(layout.shard_file(array, shard) for shard in shards)
    for path in sorted(root.glob(f".*{SCRATCH_SUFFIX}")):
        yield stray(path.name, LEFTOVER)
    folders = {folder for name in known for folder in folders_above(name)}
    for top in sorted(name for name in folders if "/" not in name):
        yield from strays_below(root, top, known, folders)


def folders_above(name: str) -> Iterator[str]:
    while name := name.rpartition("/")[0]:
        yield name


def strays_below(root: Path, folder: str, known: set[str], folders: set[str]) -> Iterator[Finding]:
    """Names as strings throughout: a large cache has hundreds of thousands of them."""
    try:
        entries = sorted(os.scandir(root / folder), key=lambda entry: entry.name)
    except NotADirectoryError:
        yield stray(folder)
        return
    except FileNotFoundError:
        return  # the files that should be in it are missed one by one
    for entry in entries:
        name = f"{folder}/{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            inner = [*strays_below(root, name, known, folders)]
            yield from inner or ([] if name in folders or name in known else [stray(name)])
        elif name not in known:
            yield stray(name, LEFTOVER if name.endswith(SCRATCH_SUFFIX) else STRAY)
