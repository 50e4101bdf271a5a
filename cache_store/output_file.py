"""What programs write for their user, reports, pages, runs: never into a cache, where they could replace its own."""

from pathlib import Path

from cache_store.errors import ConfigError
from cache_store.publish import write_file


def refuse_output(option: str, path: Path, cache: Path) -> None:
    """ConfigError, before any work is done, where `path` cannot be written or lies in the cache."""
    if path.is_dir():
        raise ConfigError(f"{option}: {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{option}: the folder of {path} does not exist")
    refuse_inside(option, path, cache)


def refuse_inside(option: str, path: Path, cache: Path) -> None:
    """ConfigError where `path`, a file or a folder, lies in the cache or is it."""
    if path.resolve().is_relative_to(cache.resolve()):
        raise ConfigError(f"{option}: {path} lies in the cache {cache}; name another place")


def write_output(path: Path, data: bytes) -> None:
    """Whole or absent; what is no plain file, as a pipe or /dev/stdout, is written to and stays what it is."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(data)
    else:
        write_file(path, data)
