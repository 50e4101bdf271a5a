"""What docs/format.md says in words, done with nothing of this project's: canonical JSON, digests, checksums, sums."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import rfc8785

from cache_store import open_cache
from cache_store.cache.metadata import write_build
from cache_store.format.plan import DIGESTED, digested_lines
from cache_store.format.schema import StoreFormat
from tests.cache_store.format.test_format_page import CACHED, REJECTED, ROWS, SAMPLES_PER_SHARD, shard_path, small_cache
from tests.make_cache import caption, make_cache


def digest(record: Any) -> str:
    return hashlib.sha256(rfc8785.dumps(record)).hexdigest()


def crc32c(data: bytes) -> int:
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@pytest.fixture
def cache(store_format: StoreFormat, tmp_path: Path) -> Path:
    return small_cache(tmp_path / "cache", store_format)


@pytest.fixture
def extreme_cache(store_format: StoreFormat, tmp_path: Path) -> Path:
    """Latents whose sums need every way to write a float; ids and captions that need every way to write text."""
    scales = np.array([1e-21, 3e-5, 1e-4, 1.0, 1e5, 1e12, 1e18], np.float32)
    latents = np.random.default_rng(1).standard_normal((ROWS, 7, 3, 5), np.float32) * scales[:, None, None]
    latents[:, 3] = np.round(latents[:, 3])
    names = [f'é \u2028 \x7f\x01\x1f \\ "{row}" \U0001f600\n' for row in range(ROWS)]
    means = [1e-5, 9.99e-6, -0.0, 1e15, 1e16, -2.5e-300, 1.7976931348623157e308]
    settings = {"rejected": REJECTED, "samples_per_shard": SAMPLES_PER_SHARD, "store_format": store_format}
    texts = [caption(f"a {name}/") for name in names]
    path = make_cache(tmp_path / "cache", latents, names, texts, dtype="float32", latents_mean=means, **settings)
    write_build(path, {"empty": {}, "none": [], "text": names, "floats": [1e-7, 0.0001, 9999999999999998.0], "int": -3})
    return path


def test_every_digest_of_a_cache_follows_from_the_pages_rules(extreme_cache):
    files = sorted(path for path in extreme_cache.rglob("*.json"))
    texts = {path.relative_to(extreme_cache).as_posix(): path.read_text() for path in files}
    records = {name: json.loads(text, parse_int=float) for name, text in texts.items()}
    assert {name: rfc8785.dumps(record) for name, record in records.items()} == {
        name: text.encode() for name, text in texts.items()
    }
    signed = [record for record in records.values() if "sha256" in record]
    assert len(signed) == 3 + 2
    assert all(digest({**record, "sha256": ""}) == record["sha256"] for record in signed)
    spec, seal = records["zarr.json"]["attributes"]["encode_once"], records["seal.json"]
    contents = [records[f"commits/{shard:06d}.json"]["content"] for shard in range(3)]
    assert digest(spec) == seal["spec_digest"]
    recipe = {name: value for name, value in spec.items() if name not in ("rows", "plan_digest")}
    assert [recipe] * 4 == [each["recipe"] for each in (seal, *contents)]
    assert [digest(content) for content in contents] == seal["commits"]
    identity = hashlib.sha256("".join(seal["commits"]).encode()).hexdigest()
    assert identity == seal["identity"] == open_cache(extreme_cache).seal.identity


def test_digests_over_rows_are_of_canonical_json(extreme_cache):
    """Msgspec writes them, a hundred times as fast, and the same bytes: rows hold no floats."""
    table = pq.read_table(extreme_cache / "plan.parquet")
    rows = zip(*(table[name].to_pylist() for name in DIGESTED), strict=True)
    assert b"".join(digested_lines(table)) == b"".join(rfc8785.dumps(row) + b"\n" for row in rows)


def test_digests_of_plan_and_rows_follow_from_the_pages_rules(extreme_cache):
    def line(values: list[Any]) -> bytes:
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode() + b"\n"

    plan = pq.read_table(extreme_cache / "plan.parquet").to_pylist()
    lines = [line([each["row"], each["id"], each["uri"], each["conversations"]]) for each in plan]
    spec = json.loads((extreme_cache / "zarr.json").read_text())["attributes"]["encode_once"]
    assert hashlib.sha256(b"".join(lines)).hexdigest() == spec["plan_digest"]
    content = json.loads((extreme_cache / "commits/000001.json").read_text())["content"]
    assert hashlib.sha256(b"".join(lines[4:8])).hexdigest() == content["plan_digest"]
    samples = pq.read_table(extreme_cache / "samples/000001.parquet").to_pylist()
    rows = [line([each["row"], each["id"], each["content_sha256"]]) for each in samples]
    assert hashlib.sha256(b"".join(rows)).hexdigest() == content["rows_digest"]


def test_the_samples_table_says_where_a_latent_lies_and_its_crc32c(cache):
    assert crc32c(b"123456789") == 0xE3069283
    latents = open_cache(cache).read(np.arange(len(CACHED)))
    for number, row in enumerate(CACHED):
        shard, slot = divmod(row, SAMPLES_PER_SHARD)
        sample = pq.read_table(cache / f"samples/{shard:06d}.parquet").slice(slot, 1).to_pylist()[0]
        payload = shard_path(cache, shard).read_bytes()[sample["offset"] :][: sample["length"]]
        assert payload == latents[number].tobytes()
        assert crc32c(payload) == sample["crc32c"]


@pytest.mark.parametrize("store_format", ["zarr"], indirect=True)
def test_a_zarr_shards_checksums_lie_where_the_page_says(cache):
    data = shard_path(cache, 1).read_bytes()
    index = data[-16 * SAMPLES_PER_SHARD - 4 : -4]
    assert crc32c(index) == int.from_bytes(data[-4:], "little")
    for offset, length in np.frombuffer(index, "<u8").reshape(-1, 2).tolist():
        latent = data[offset : offset + length]
        assert crc32c(latent[:-4]) == int.from_bytes(latent[-4:], "little")


def test_the_previews_equations_are_as_the_page_says(cache):
    rgb_NHW3 = np.random.default_rng(0).random((ROWS, 3, 5, 3), np.float32)
    latent_NCHW = open_cache(cache).read(np.arange(len(CACHED))).astype(np.float64)
    v = np.concatenate([latent_NCHW, np.ones_like(latent_NCHW[:, :1])], axis=1)[:, :, ::2, ::2]
    v, t = v.transpose(0, 2, 3, 1).reshape(-1, 5), rgb_NHW3[CACHED, ::2, ::2].astype(np.float64).reshape(-1, 3)
    records = [json.loads(path.read_text()) for path in sorted((cache / "commits").iterdir())]
    gram, moment = (sum(np.array(each["content"]["preview"][name]) for each in records) for name in ("gram", "moment"))
    np.testing.assert_allclose(gram, v.T @ v, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(moment, v.T @ t, rtol=1e-12, atol=1e-12)
    g = np.diag(gram)
    solution = np.linalg.solve(gram + 1e-6 * np.diag(g + g.mean()), moment)
    preview = json.loads((cache / "seal.json").read_text())["array"]["preview"]
    np.testing.assert_allclose(solution, [*np.transpose(preview["weight"]), preview["bias"]], rtol=1e-9)
