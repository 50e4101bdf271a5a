"""Data sets on the Hub as sources."""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from precompute.sources.config import SourceConfig
from precompute.sources.opening import open_source
from tests.hub import DATA_SET, running_hub
from tests.precompute.sources.pictures import write_dataset

READ_ALL = """
import hashlib, sys
from cache_store.program.running import run_program
from precompute.sources.config import SourceConfig
from precompute.sources.opening import open_source

def run(words):
    source = open_source(SourceConfig(kind="parquet", path=words[0]))
    for sample in source.samples():
        print(sample["uri"], hashlib.sha256(source.read(sample["uri"])).hexdigest(), sample["fingerprint"])
    return 0

sys.exit(run_program("precompute", run, None))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    root = tmp_path_factory.mktemp("hub")
    for place, numbers in enumerate(((9, 1, 2), (3, 4, 5, 6, 7))):
        write_dataset(root / f"data/train-{place}.parquet", *numbers)
    with running_hub(root) as endpoint:
        yield endpoint, root


def read_all(url: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", READ_ALL, url], env={**os.environ, **environment}, capture_output=True, text=True
    )


@pytest.mark.parametrize("path", ["data/train-*.parquet", "data"])
def test_tables_on_the_hub_are_those_on_disk(hub, path):
    endpoint, root = hub
    done = read_all(f"{DATA_SET}/{path}", HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
    source = open_source(SourceConfig(kind="parquet", path=str(root / path)))
    uris = [str(sample["uri"]) for sample in source.samples()]
    here = [(uri, hashlib.sha256(source.read(uri)).hexdigest()) for uri in uris]
    assert [tuple(line.split()[:2]) for line in done.stdout.splitlines()] == here, done.stderr
    sha1 = hashlib.sha1((root / "data/train-0.parquet").read_bytes()).hexdigest()
    assert done.stdout.splitlines()[0].endswith(f":{sha1}")


def test_what_the_hub_refuses_is_one_line(hub):
    endpoint, _ = hub
    online = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
    for url, environment, code, said in (
        ("hf://datasets/me/others/a.parquet", online, 1, "no such data set .* check its name and HF_TOKEN"),
        (f"{DATA_SET}/data/9.parquet", online, 2, "9.parquet holds no .parquet file"),
        ("hf://models/me/pictures/a.parquet", online, 2, "only data sets .* hf://datasets/OWNER/NAME/"),
        (f"{DATA_SET}/a.parquet", {"HF_HUB_OFFLINE": "1"}, 1, "the Hub cannot be read: check"),
    ):
        done = read_all(url, **environment)
        assert done.returncode == code, done.stderr
        assert re.search(f"^precompute: error: .*{said}", done.stderr)
        assert done.stderr.count("\n") == 1
