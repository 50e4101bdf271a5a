"""An audit finds what no checksum can: latents that are not those of their images."""

import json
import math
import re
import shlex
import shutil
import signal
import threading
from itertools import islice
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cache.files import open_plan, read_samples
from cache_store.cache.metadata import read_spec
from cache_store.cache.writer import Outcome, ShardBuilder
from cache_store.format.schema import CACHED, DTYPES, StoreDtype
from cache_store.storage.local import LocalStore
from cache_store.verify.verify import verify
from precompute.audit.audit import audit as audit_cache
from precompute.audit.audit import random_order
from precompute.audit.bar import AuditBar
from precompute.audit.comparison import differences
from precompute.audit.report import upper_bound
from precompute.audit.tolerance import RELATIVE_TOLERANCE, device_class
from precompute.cli import main
from precompute.config import AuditConfig
from precompute.encoders.encoder import Encoder
from tests.make_cache import seal_cache
from tests.precompute.conftest import (
    BROKEN,
    SAMPLES,
    image_bytes,
    make_vae,
    run_build,
    sample_name,
    write_source,
)

CACHED_SAMPLES = SAMPLES - len(BROKEN)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, vae_path: Path) -> Path:
    """A folder of `source`, `vae` and `cache`, made once."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(vae_path, folder / "vae")
    build(folder)
    return folder


def build(folder: Path, **overrides: object) -> None:
    write_source(folder / "source")
    run_build(folder, folder / "source", folder / "vae", **overrides)


class Audit:
    """Runs audits of one cache and holds what they said."""

    def __init__(self, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._cache, self._capsys = cache, capsys

    def __call__(self, *options: str) -> int:
        path = self._cache.parent / "audit.json"
        path.unlink(missing_ok=True)
        self._capsys.readouterr()
        code = main(["audit", str(self._cache), "--report", str(path), *options])
        self.out, self.error = self._capsys.readouterr()
        assert "Traceback" not in self.error
        self.report = json.loads(path.read_text()) if path.exists() else None
        return code


@pytest.fixture
def audit(built: Path, capsys: pytest.CaptureFixture[str]) -> Audit:
    return Audit(built / "cache", capsys)


@pytest.fixture
def own(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Audit:
    """An audit of a cache that a test may spoil, with its source and encoder."""
    for name in ("source", "vae"):
        shutil.copytree(built / name, tmp_path / name)
    build(tmp_path)
    return Audit(tmp_path / "cache", capsys)


@pytest.mark.parametrize(
    ("store_format", "dtype"),
    [*[("zarr", dtype) for dtype in get_args(StoreDtype)], ("webdataset", "float16"), ("webdataset", "float32")],
)
def test_an_untouched_cache_audits_with_equal_bits(built, tmp_path, capsys, store_format, dtype):
    shutil.copytree(built / "vae", tmp_path / "vae")
    build(tmp_path, store__format=store_format, store__dtype=dtype)
    audit = Audit(tmp_path / "cache", capsys)
    assert audit() == 0
    assert audit.report["equal_bits"] == audit.report["compared"] == CACHED_SAMPLES
    assert audit.report["worst"]["difference"]["largest"] == audit.report["median"] == 0.0
    assert f"all {CACHED_SAMPLES} cached samples were compared: 0 differ by more than" in audit.out


def alter(cache: Path, row: int) -> None:
    """Build the row's shard again with one other latent, and seal: every checksum is right."""
    spec, held = read_spec(cache), open_cache(cache)
    shard = row // spec.samples_per_shard
    samples = read_samples(cache, shard).to_pylist()
    latents = np.zeros((len(samples), *spec.array.shape), np.float32)
    cached = [place for place, sample in enumerate(samples) if sample["status"] == CACHED]
    first = sum(held.seal.cached_per_shard[:shard])
    latents[cached] = held.read(np.arange(first, first + len(cached)))
    latents[row % spec.samples_per_shard] += 0.25
    outcomes = [Outcome(**{name: sample[name] for name in Outcome.__annotations__}) for sample in samples]
    with ShardBuilder(LocalStore(cache), spec, shard, open_plan(cache).shard(shard)) as builder:
        builder.append(latents, np.zeros((len(samples), *latents.shape[2:], 3), np.float32), outcomes)
        builder.commit(seconds=1.0, device="cpu", versions={})
    seal_cache(cache, spec)


def test_a_latent_of_no_image_is_named_though_checksums_are_right(own, tmp_path):
    alter(tmp_path / "cache", row=9)
    assert not verify(tmp_path / "cache", "full").findings
    assert own() == 1
    (finding,) = own.report["findings"]
    assert (finding["row"], finding["id"], finding["shard"]) == (9, sample_name(9), 1)
    assert "row 9, sample-009 (shard 1): its latent differs by 0.25" in own.out
    assert f"all {CACHED_SAMPLES} cached samples were compared: 1 differ by more than" in own.out
    assert own.report["equal_bits"] == CACHED_SAMPLES - 1
    remove = next(line for line in own.out.splitlines() if line.startswith("next: rm "))
    for name in shlex.split(remove.removeprefix("next: rm ").partition(", if ")[0]):
        Path(name).unlink()
    assert "next: rerun the `precompute build`" in own.out
    assert main(["build", "--config", str(tmp_path / "build.yaml")]) == 0
    assert own() == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sample_006": image_bytes(99)}, "row 6, sample-006 (shard 0): its image changed: sha256 is"),
        ({"numbers": [number for number in range(SAMPLES) if number != 6]},
         "row 6, sample-006 (shard 0): its image is gone: missing"),
    ],
    ids=["changed", "gone"],
)  # fmt: skip
def test_an_image_that_changed_or_is_gone_is_named_and_no_other(own, tmp_path, change, said):
    write_source(tmp_path / "source", **change)
    assert own() == 1
    assert [finding["id"] for finding in own.report["findings"]] == ["sample-006"]
    assert said in own.out
    assert own.report["equal_bits"] == CACHED_SAMPLES - 1


def test_another_encoder_is_refused_with_the_field_that_differs(own, tmp_path):
    make_vae(tmp_path / "vae", seed=1)
    assert own() == 1
    assert "encoder.weights_sha256" in own.error
    assert own.report is None


def test_one_drawn_sample_compares_its_whole_batch(audit):
    assert audit("--samples", "1", "--seed", "3") == 0
    assert audit.report["drawn"] == 1
    assert audit.report["compared"] in (2, 3)
    assert audit.report["bound"] == pytest.approx(0.95)
    assert "with 95% confidence at most 95.00% of the 20 cached samples differ by more than" in audit.out


def test_a_wrong_neighbour_is_a_finding_outside_the_bound(own, tmp_path):
    """Drawn or not, what is wrong is named; but only what was drawn says something of the rest."""
    alter(tmp_path / "cache", row=9)
    batch = [8, 9, 10]
    seed = next(seed for seed in range(1000) if number_to_row(first_drawn(CACHED_SAMPLES, 1, seed)[0]) in (8, 10))
    assert own("--samples", "1", "--seed", str(seed)) == 1
    assert own.report["compared"] == len(batch)
    assert own.report["bound"] == pytest.approx(0.95)


def first_drawn(total: int, samples: int, seed: int) -> list[int]:
    return list(islice(random_order(total, seed), samples))


def number_to_row(number: int) -> int:
    return [row for row in range(SAMPLES) if row not in BROKEN][number]


def test_a_seed_repeats_the_draw_and_a_larger_draw_begins_with_it(audit):
    assert first_drawn(1000, 20, 5) != first_drawn(1000, 20, 6)
    assert sorted(random_order(1000, 5)) == list(range(1000))
    assert audit("--samples", "2") == 0
    first = audit.report
    assert f"seed        {first['seed']}" in audit.out
    assert audit("--samples", "2", "--seed", str(first["seed"])) == 0
    assert {**audit.report, "seconds": 0} == {**first, "seconds": 0}


def test_every_sample_is_drawn_equally_often():
    counts = np.bincount([number for seed in range(2000) for number in first_drawn(5, 2, seed)], minlength=5)
    assert (np.abs(counts - 800) < 120).all()  # six standard deviations, and the seeds are fixed


def test_a_time_budget_stops_the_draw_and_weakens_the_statement(audit):
    assert audit("--seconds", "1e-9") == 0
    assert 1 <= audit.report["drawn"] < audit.report["asked"] == CACHED_SAMPLES
    assert audit.report["bound"] == upper_bound(0, audit.report["drawn"])


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ([], 7),
        (["--seconds", "3600"], CACHED_SAMPLES),
        (["--samples", "5"], 5),
        (["--samples", "5", "--seconds", "3600"], 5),
        (["--samples", "1000"], CACHED_SAMPLES),
    ],
)
def test_the_first_of_time_and_number_ends_the_draw(audit, monkeypatch, options, drawn):
    """Of 20 cached samples, where a draw that is told neither takes 7."""
    monkeypatch.setattr("precompute.config.SAMPLES_DRAWN", 7)
    assert audit(*options) == 0
    assert audit.report["drawn"] == audit.report["asked"] == drawn


@pytest.mark.parametrize(
    ("config", "total"),
    [(AuditConfig(), CACHED_SAMPLES), (AuditConfig(samples=2), 2), (AuditConfig(samples=2, seconds=3600), 2)],
)
def test_the_bar_runs_to_the_samples_that_there_are_to_draw(built, config, total):
    with AuditBar(config) as shown:
        audit_cache(built / "cache", config, threading.Event(), shown)
        assert (shown.bar.total, shown.bar.n) == (total, total)


def test_the_bar_runs_to_the_seconds_where_they_alone_end_the_audit():
    with AuditBar(AuditConfig(seconds=600)) as shown:
        for seconds, end in ((12.34, 12.3), (599.0, 599.0), (601.0, 600.0)):
            shown(drawn=1, asked=10**6, seconds=seconds)
            assert (shown.bar.total, shown.bar.n) == (600, end)


def test_the_tolerance_names_its_entry_of_the_table(audit):
    assert audit("--samples", "1") == 0
    assert audit.report["device_class"] == "cpu"
    assert audit.report["relative_tolerance"] == RELATIVE_TOLERANCE["float32", "cpu"]
    assert re.search(r"^tolerance   .* \(float32, cpu\)$", audit.out, re.MULTILINE)


def test_a_full_disk_at_the_end_loses_the_file_alone_and_names_it(built, capsys):
    assert main(["audit", str(built / "cache"), "--samples", "1", "--seed", "3", "--report", "/dev/full"]) == 1
    out, error = capsys.readouterr()
    assert "seed        3\n" in out
    assert "with 95% confidence" in out
    assert error.endswith("precompute: error: No space left on device: /dev/full\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_audit_with_code_3_and_what_it_has(audit, monkeypatch, number):
    encode = Encoder.encode

    def signalled(self, image_NYX3):
        if signal.getsignal(number) is not before:
            signal.raise_signal(number)
        return encode(self, image_NYX3)

    before = signal.getsignal(number)
    monkeypatch.setattr(Encoder, "encode", signalled)
    assert audit() == 3
    assert "precompute: stopped: " in audit.error
    assert 1 <= audit.report["drawn"] < CACHED_SAMPLES


@pytest.mark.parametrize(("relative", "code"), [(3e-6, 0), (3e-4, 1)])
def test_an_encoder_that_rounds_otherwise_passes_one_off_does_not(built, tmp_path, capsys, monkeypatch, relative, code):
    """As another machine's float32 kernels would, measured at some 5e-6 of the root mean square."""
    shutil.copytree(built / "vae", tmp_path / "vae")
    build(tmp_path, store__dtype="float32")
    encode = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, image_NYX3: encode(self, image_NYX3) * (1 + relative))
    audit = Audit(tmp_path / "cache", capsys)
    assert audit() == code
    assert audit.report["equal_bits"] == 0
    assert len(audit.report["findings"]) == (CACHED_SAMPLES if code else 0)


@pytest.mark.parametrize(("bad", "drawn"), [(0, 1), (0, 59), (0, 299), (1, 20), (7, 100), (19, 20)])
def test_the_bound_is_where_so_few_are_seen_once_in_twenty(bad, drawn):
    share = upper_bound(bad, drawn)
    seen = sum(math.comb(drawn, count) * share**count * (1 - share) ** (drawn - count) for count in range(bad + 1))
    assert seen == pytest.approx(0.05)
    if bad == 0:
        assert share == pytest.approx(1 - 0.05 ** (1 / drawn))


def test_a_bound_knows_its_ends():
    assert upper_bound(3, 3) == upper_bound(0, 0) == 1.0
    assert upper_bound(0, 299) < 0.01 < upper_bound(0, 298)


@pytest.mark.parametrize(("dtype", "step"), [("float16", 2**-10), ("bfloat16", 2**-7), ("float32", 2**-23)])
def test_rounding_to_the_stored_dtype_is_no_difference(dtype, step):
    latent = np.ones((1, 1, 1, 1), np.float32)
    (one,) = differences(latent.astype(DTYPES[dtype]), latent + step, dtype)
    (two,) = differences(latent.astype(DTYPES[dtype]), latent + 2 * step, dtype)
    assert (one.largest, one.beyond_rounding, one.equal_bits) == (step, 0.0, False)
    assert (two.largest, two.beyond_rounding) == (2 * step, step)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e6])
def test_what_is_not_finite_any_more_differs_by_infinity(value):
    stored = np.ones((1, 1, 1, 2), np.float16)
    (found,) = differences(stored, np.array([[[[1.0, value]]]], np.float32), "float16")
    assert found.largest == found.beyond_rounding == math.inf


def test_the_looser_device_decides():
    assert device_class("cpu", "cpu") == "cpu"
    assert device_class("cpu", "cuda:3") == device_class("cuda", "cpu") == "cuda"
    assert {dtype for dtype, _ in RELATIVE_TOLERANCE} == {"float32", "bfloat16"}


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--samples", "0"], 2, "samples must be at least 1"),
        (["--seconds", "0"], 2, "seconds must be more than 0"),
        (["--seed", "-1"], 2, "seed must be at least 0"),
        (["--report", "/nowhere/report.json"], 2, "the folder of /nowhere/report.json does not exist"),
        (["--device", "cuda:99"], 2, "encoder.device"),
    ],
)
def test_a_mistake_is_one_line(audit, options, code, message):
    assert audit(*options) == code
    assert message in audit.error


def test_an_unsealed_cache_is_not_audited(own, tmp_path):
    (tmp_path / "cache/seal.json").unlink()
    assert own() == 1
    assert "is not sealed" in own.error
