"""An audit finds what no checksum can: latents that are not those of their images."""

import json
import math
import re
import shlex
import signal
import threading
from contextlib import closing
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from cache_store.cache.metadata import read_build, write_build
from cache_store.format.schema import DTYPES, StoreDtype
from cache_store.verify.verify import verify
from precompute.audit.audit import audit as audit_cache
from precompute.audit.audit import random_order
from precompute.audit.bar import AuditBar
from precompute.audit.comparison import differences
from precompute.audit.report import upper_bound
from precompute.audit.tolerance import RELATIVE_TOLERANCE, device_class
from precompute.cli import main
from precompute.config import AuditConfig
from tests.precompute.conftest import BROKEN, SAMPLES, Project, image_bytes, make_vae, sample_name

CACHED_SAMPLES = SAMPLES - len(BROKEN)


class Audit:
    """Runs audits of a project's cache and holds what they said."""

    def __init__(self, project: Project) -> None:
        self.project = project

    def __call__(self, *options: str, code: int = 0) -> dict[str, Any]:
        """The report, if there is one."""
        path = self.project.folder / "audit.json"
        path.unlink(missing_ok=True)
        self.said = self.project.run(main, "audit", self.project.cache, "--report", path, *options, code=code)
        return json.loads(path.read_text()) if path.exists() else {}


@pytest.fixture
def audit(built: Project) -> Audit:
    return Audit(built)


@pytest.mark.parametrize(
    ("store_format", "dtype"),
    [*[("zarr", dtype) for dtype in get_args(StoreDtype)], ("webdataset", "float16"), ("webdataset", "float32")],
)
def test_an_untouched_cache_audits_with_equal_bits(project, store_format, dtype):
    project.build(store__format=store_format, store__dtype=dtype)
    audit = Audit(project)
    report = audit()
    assert report["equal_bits"] == report["compared"] == CACHED_SAMPLES
    assert report["worst"]["difference"]["largest"] == report["median"] == 0.0
    assert f"all {CACHED_SAMPLES} cached samples were compared: 0 differ by more than" in audit.said


@pytest.fixture
def wrong(project: Project, encoding: Any) -> Audit:
    """An audit of a cache whose row 9, the middle one of the fourth batch, is not its image's; all checksums fit."""
    offsets = chain([0, 0, 0, torch.tensor([0, 0.25, 0])[:, None, None, None]], repeat(0))
    encoding(lambda encode, image: encode(image) + next(offsets))
    project.build()
    assert not verify(project.cache, "full").findings
    return Audit(project)


def test_a_wrong_latent_is_named_though_checksums_are_right(wrong):
    report = wrong(code=1)
    (finding,) = report["findings"]
    assert (finding["row"], finding["id"], finding["shard"]) == (9, sample_name(9), 1)
    assert "row 9, sample-009 (shard 1): its latent differs by 0.25" in wrong.said
    assert f"all {CACHED_SAMPLES} cached samples were compared: 1 differ by more than" in wrong.said
    assert report["equal_bits"] == CACHED_SAMPLES - 1
    remove = next(line for line in wrong.said.splitlines() if line.startswith("next: rm "))
    for name in shlex.split(remove.removeprefix("next: rm ").partition(", if ")[0]):
        Path(name).unlink()
    assert "next: rerun the `precompute build`" in wrong.said
    wrong.project.build()
    wrong()


WITHOUT_6 = [number for number in range(SAMPLES) if number != 6]


@pytest.mark.parametrize(
    ("numbers", "replaced", "said"),
    [
        (range(SAMPLES), {"sample_006": image_bytes(99)}, "its image changed: sha256 is"),
        (WITHOUT_6, {}, "its image is gone: missing"),
    ],
)
def test_an_image_that_changed_or_is_gone_is_named_and_no_other(audit, built, numbers, replaced, said):
    built.has(numbers, **replaced)
    report = audit(code=1)
    assert [finding["id"] for finding in report["findings"]] == ["sample-006"]
    assert f"row 6, sample-006 (shard 0): {said}" in audit.said
    assert report["equal_bits"] == CACHED_SAMPLES - 1


def test_another_encoder_is_refused_with_the_field_that_differs(audit, built):
    config = read_build(built.cache).config
    config["encoder"]["model"] = str(make_vae(built.folder / "vae", seed=1))
    write_build(built.cache, config)
    assert not audit(code=1)
    assert "encoder.weights_sha256" in audit.said


def test_one_drawn_sample_compares_its_whole_batch(audit):
    report = audit("--samples", "1", "--seed", "3")
    assert report["drawn"] == 1
    assert report["compared"] in (2, 3)
    assert report["bound"] == pytest.approx(0.95)
    assert "with 95% confidence at most 95.00% of the 20 cached samples differ by more than" in audit.said
    assert report["device_class"] == "cpu"
    assert report["relative_tolerance"] == RELATIVE_TOLERANCE["float32", "cpu"]
    assert re.search(r"^tolerance   .* \(float32, cpu\)$", audit.said, re.MULTILINE)


def test_a_wrong_neighbour_is_a_finding_outside_the_bound(wrong):
    """Drawn or not, what is wrong is named; but only what was drawn says something of the rest."""
    seed = next(seed for seed in range(1000) if number_to_row(first_drawn(CACHED_SAMPLES, 1, seed)[0]) in (8, 10))
    report = wrong("--samples", "1", "--seed", str(seed), code=1)
    assert report["compared"] == 3  # 8, 9 and 10
    assert report["bound"] == pytest.approx(0.95)


def first_drawn(total: int, samples: int, seed: int) -> list[int]:
    return list(islice(random_order(total, seed), samples))


def number_to_row(number: int) -> int:
    return [row for row in range(SAMPLES) if row not in BROKEN][number]


def test_a_seed_repeats_the_draw(audit):
    assert first_drawn(1000, 20, 5) != first_drawn(1000, 20, 6)
    assert sorted(random_order(1000, 5)) == list(range(1000))
    first = audit("--samples", "2")
    assert f"seed        {first['seed']}" in audit.said
    again = audit("--samples", "2", "--seed", str(first["seed"]))
    assert {**again, "seconds": 0} == {**first, "seconds": 0}


def test_every_sample_is_drawn_equally_often():
    counts = np.bincount([number for seed in range(2000) for number in first_drawn(5, 2, seed)], minlength=5)
    assert (np.abs(counts - 800) < 120).all()  # six standard deviations, and the seeds are fixed


def test_a_time_budget_stops_the_draw_and_weakens_the_statement(audit):
    report = audit("--seconds", "1e-9")
    assert 1 <= report["drawn"] < report["asked"] == CACHED_SAMPLES
    assert report["bound"] == upper_bound(0, report["drawn"])


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
    report = audit(*options)
    assert report["drawn"] == report["asked"] == drawn


@pytest.mark.parametrize(
    ("config", "total"),
    [(AuditConfig(), CACHED_SAMPLES), (AuditConfig(samples=2), 2), (AuditConfig(samples=2, seconds=3600), 2)],
)
def test_the_bar_runs_to_the_samples_that_there_are_to_draw(built, config, total):
    with closing(AuditBar(config)) as shown:
        audit_cache(built.cache, config, threading.Event(), shown)
        assert (shown.bar.total, shown.bar.n) == (total, total)


def test_the_bar_runs_to_the_seconds_where_they_end_the_audit():
    with closing(AuditBar(AuditConfig(seconds=600))) as shown:
        for seconds, end in ((12.34, 12.3), (599.0, 599.0), (601.0, 600.0)):
            shown(drawn=1, asked=10**6, seconds=seconds)
            assert (shown.bar.total, shown.bar.n) == (600, end)


def test_a_full_disk_at_the_end_loses_the_report_file_alone(built):
    said = built.run(main, "audit", built.cache, "--samples", "1", "--seed", "3", "--report", "/dev/full", code=1)
    assert "seed        3\n" in said
    assert "with 95% confidence" in said
    assert said.endswith("precompute: error: No space left on device: /dev/full\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_audit_with_code_3_and_what_it_has(audit, encoding, number):
    def signalled(encode, image_NYX3):
        if signal.getsignal(number) is not before:
            signal.raise_signal(number)
        return encode(image_NYX3)

    before = signal.getsignal(number)
    encoding(signalled)
    report = audit(code=3)
    assert "precompute: stopped: " in audit.said
    assert 1 <= report["drawn"] < CACHED_SAMPLES


@pytest.mark.parametrize(("relative", "code"), [(3e-6, 0), (3e-4, 1)])
def test_an_encoder_may_round_otherwise_but_not_be_off(project, encoding, relative, code):
    """As another machine's float32 kernels would, measured at some 5e-6 of the root mean square."""
    project.build(store__dtype="float32")
    encoding(lambda encode, image: encode(image) * (1 + relative))
    report = Audit(project)(code=code)
    assert report["equal_bits"] == 0
    assert len(report["findings"]) == (CACHED_SAMPLES if code else 0)


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
    ("options", "message"),
    [
        (["--samples", "0"], "samples must be at least 1"),
        (["--seconds", "0"], "seconds must be more than 0"),
        (["--seed", "-1"], "seed must be at least 0"),
        (["--report", "/nowhere/report.json"], "the folder of /nowhere/report.json does not exist"),
        (["--device", "cuda:99"], "encoder.device"),
    ],
)
def test_a_mistake_is_one_line(audit, options, message):
    audit(*options, code=2)
    assert message in audit.said


def test_an_unsealed_cache_is_not_audited(audit, built):
    built.lose("seal.json")
    audit(code=1)
    assert "is not sealed" in audit.said
