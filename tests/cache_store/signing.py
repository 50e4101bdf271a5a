"""Edit records and compute every digest over them again, as an attacker would."""

import base64
import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cache_store.cache.commit import write_rows
from cache_store.errors import CacheError
from cache_store.format.formats import shard_format
from cache_store.format.record import canonical_json
from cache_store.format.roll import ENTRY
from cache_store.format.schema import Spec
from cache_store.format.shards import Location
from cache_store.format.tables import SUMS_KEY
from cache_store.format.zarr import ZarrFormat


def load(path: Path) -> dict[str, Any]:
    try:
        record = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return record if isinstance(record, dict) else {}


def written(value: Any) -> bytes:
    try:
        return canonical_json(value)
    except (CacheError, RecursionError):
        return msgspec.json.encode(value, order="sorted")


def digest(value: Any) -> str:
    return hashlib.sha256(written(value)).hexdigest()


def save(path: Path, record: dict[str, Any]) -> None:
    path.write_bytes(written(record))


def save_signed(path: Path, record: dict[str, Any]) -> None:
    if record:
        save(path, {**record, "sha256": digest({**record, "sha256": ""})})


@contextlib.contextmanager
def edited(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a record to change in place; its digests stay unchanged."""
    record = load(path)
    yield record
    save(path, record)


@contextlib.contextmanager
def edited_spec(root: Path) -> Iterator[dict[str, Any]]:
    with edited(root / "zarr.json") as group:
        yield group["attributes"]["encode_once"]


@contextlib.contextmanager
def edited_rows(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield a samples table's rows, to change in place; its footer keeps the sums."""
    table, stated = pq.read_table(path, partitioning=None), pq.read_metadata(path).metadata.get(SUMS_KEY.encode())
    rows = table.to_pylist()
    yield rows
    with path.open("wb") as stream:
        write_rows(stream, pa.Table.from_pylist(rows, table.schema), stated and base64.b64decode(stated))


def set_field(record: Any, field: str, value: object) -> None:
    """Set a field by its path, such as `files.0.bytes`; a function gets the old value."""
    *parents, last = (int(part) if part.isdigit() else part for part in field.split("."))
    for part in parents:
        record = record[part]
    record[last] = value(record[last]) if callable(value) else value


ODD = (KeyError, TypeError, AttributeError, ValueError, OverflowError, OSError, msgspec.ValidationError)
"""Errors that odd values in a record cause; digests over such values stay unchanged."""


def resign(root: Path) -> None:
    """Compute every digest of files, records and the whole cache again."""
    spec, contents = resign_spec(root), []
    recipe = {name: value for name, value in spec.items() if name not in ("shards", "arrays", "parts")}
    for path in sorted(root.glob("commits/*.json")):
        record = load(path)
        with contextlib.suppress(*ODD):
            contents.append(content := record["content"])
            content.update({"recipe": recipe} if recipe and "recipe" in content else {})
            for file in content["files"]:
                refile(root, file)
            content["proof"] = proof_on_disk(root, spec, content["files"])
        save_signed(path, record)
    if seal := load(root / "seal.json"):
        resign_roll(root / "shards.bin", contents)
        seal.update(spec=spec or seal.get("spec"))
        with contextlib.suppress(*ODD):
            for file in (*seal["plan_files"], seal["rejected_file"], seal["shards_file"]):
                refile(root, file)
        save_signed(root / "seal.json", seal)
    for name in ("build.json", "texts.json"):
        save_signed(root / name, load(root / name))


def resign_roll(path: Path, contents: list[dict[str, Any]]) -> None:
    """Put digest, counts, proof and bytes of these contents into shards.bin."""
    entries = np.frombuffer(path.read_bytes(), ENTRY).copy()
    for entry, content in zip(entries, contents, strict=False):
        with contextlib.suppress(*ODD):
            entry["content"] = bytes.fromhex(digest(content))
            entry["cached"], entry["bytes"] = content["cached"], content["files"][0]["bytes"]
            entry["proof"] = content["proof"]
    path.write_bytes(entries.tobytes())


def proof_on_disk(root: Path, spec: dict[str, Any], files: list[dict[str, Any]]) -> int:
    """Return the proof of a shard file as it is now, whose first sample is where its index or samples table says."""
    form, data = shard_format(msgspec.convert(spec, Spec)), memoryview((root / files[0]["path"]).read_bytes())
    if isinstance(form, ZarrFormat):
        places = form.places_in(data[-form.index_bytes :]).tolist()
    else:
        table = pq.read_table(root / files[1]["path"], ["offset", "length"], partitioning=None)
        places = [tuple(row.values()) for row in table.to_pylist() if None not in row.values()]
    return form.proof(data, [Location(*place, 0) for place in places[:1]])


def resign_spec(root: Path) -> dict[str, Any]:
    """Write the group that the format gives this spec, if possible; return the spec."""
    spec: Any = None
    with contextlib.suppress(*ODD):
        spec = load(root / "zarr.json")["attributes"]["encode_once"]
        for name, content in shard_format(msgspec.convert(spec, Spec)).metadata().items():
            if (root / name).parent.is_dir():
                (root / name).write_bytes(content)
    return spec if isinstance(spec, dict) else {}


def refile(root: Path, file: Any) -> None:
    """Update a file's record, even for a path outside the cache, as an attacker would."""
    with contextlib.suppress(*ODD):
        content = (root / file["path"]).read_bytes()
        if "bytes" in file and "sha256" in file:
            file.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
