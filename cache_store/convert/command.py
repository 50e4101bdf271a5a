"""The command `convert`: progress and summary."""

import shlex

from cache_store.cache.metadata import read_spec
from cache_store.convert.convert import ConvertConfig, convert
from cache_store.program.progress_bar import progress_bar


def run_convert(cache: str, out: str, config: ConvertConfig) -> int:
    with progress_bar(total=read_spec(cache).rows, desc="convert", unit="sample", delay=0.5) as bar:
        done = convert(cache, out, config, bar.update)
    kept = f"; {done.kept:,} were there, their records fit" if done.kept else ""
    checked = ", every latent checked as it was read and as it was written" if done.shards else ""
    print(f"converted {done.shards:,} shards{checked}{kept}")
    size = f"{done.seal.cached:,} samples, {done.seal.array.bytes:,} bytes"
    print(f"sealed {out}: {size}, cache identity {done.seal.identity}")
    print(f"next: cache-store verify {shlex.quote(out)} --level full")
    return 0
