"""Numbered pictures with a caption each, written as tars and tables, and what a source makes of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import webdataset

from precompute.sources.config import FieldNames, SourceConfig
from precompute.sources.images import Source
from precompute.sources.opening import open_source
from tests.precompute.conftest import image_bytes, plan_table


def write_tar(path: Path, samples: Mapping[str, Mapping[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with webdataset.TarWriter(str(path), mtime=1.0) as writer:
        for key, parts in samples.items():
            writer.write({"__key__": key, **parts})
    return path


def numbered(*numbers: int) -> dict[str, dict[str, Any]]:
    return {f"{number:09d}": {"png": image_bytes(number), "txt": f"Picture {number}."} for number in numbers}


def write_dataset(path: Path, *numbers: int) -> Path:
    """Write a Parquet file as `datasets` writes images with texts."""
    datasets.disable_progress_bars()
    features = {"image": datasets.Image(), "id": datasets.Value("int64"), "text": datasets.Value("string")}
    columns = {
        "image": [{"bytes": image_bytes(number), "path": f"{number}.png"} for number in numbers],
        "id": numbers,
        "text": [f"Picture {number}." for number in numbers],
    }
    path.parent.mkdir(exist_ok=True)
    datasets.Dataset.from_dict(columns, features=datasets.Features(features)).to_parquet(path, batch_size=3)
    return path


def write_pictures(kind: str, path: Path, *numbers: int) -> Path:
    """Write a tar for kind webdataset, a table for kind parquet, whose suffix `path` gets; else a folder."""
    if kind == "folder":
        path.mkdir(parents=True, exist_ok=True)
        for number in numbers:
            (path / f"{number:09d}.png").write_bytes(image_bytes(number))
        return path
    if kind == "parquet":
        return write_dataset(path.with_suffix(".parquet"), *numbers)
    return write_tar(path.with_suffix(".tar"), numbered(*numbers))


def opened(kind: str, path: Path, **fields: str) -> Source:
    return open_source(SourceConfig(kind=kind, path=str(path), fields=FieldNames(**fields)))


def rows_of(source: Source) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = plan_table(source.samples()).to_pylist()
    return rows
