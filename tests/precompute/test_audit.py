"""An audit finds latents that are not those of their images, which no checksum can."""

import json
import math
import shlex
import signal
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from cache_store import __version__
from cache_store.cache.metadata import read_build, write_build
from cache_store.format.array import DTYPES, SampleLayout, StoreDtype
from cache_store.format.quantized import as_read
from cache_store.format.schema import ArraySummary
from cache_store.verify.verify import verify
from precompute.audit import difference_of, draw
from precompute.cli import main
from precompute.encode.tolerance import LIMITS, Difference, sample_units
from tests.precompute.conftest import BROKEN, SAMPLES, Project, image_bytes, make_vae, sample_name

CACHED_SAMPLES = SAMPLES - len(BROKEN)


def audit(project: Project, *options: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Run an audit; return its report, empty if there is none, and its output."""
    path = project.folder / "audit.json"
    path.unlink(missing_ok=True)
    said = project.run(main, "audit", project.cache, "--report", path, *options, code=code)
    return json.loads(path.read_text()) if path.exists() else {}, said


@pytest.mark.parametrize(
    ("store_format", "dtype"),
    [*[("zarr", dtype) for dtype in get_args(StoreDtype)], ("webdataset", "float16")],
)
def test_an_untouched_cache_audits_with_equal_bits(project, store_format, dtype):
    project.build(store__format=store_format, store__dtype=dtype)
    report, _ = audit(project)
    assert report.items() >= {"sound": True, "error": None, "version": __version__, "findings": []}.items()
    assert report["equal_bits"] == report["compared"] == CACHED_SAMPLES
    assert report["worst"] == 0.0


def test_a_wrong_latent_is_named_though_checksums_are_right(project, encoding):
    """Row 9 is in the middle of the fourth batch. It is named drawn or not."""
    offsets = chain([0, 0, 0, torch.tensor([0, 0.25, 0])[:, None, None, None]], repeat(0))
    encoding(lambda encode, image: encode(image) + next(offsets))
    project.build()
    assert not verify(project.cache, "full").findings
    report, said = audit(project, code=1)
    (finding,) = report["findings"]
    assert (finding["row"], finding["id"], finding["shard"]) == (9, sample_name(9), 1)
    assert "row 9, sample-009 (shard 1)" in said
    assert report["worst"] == pytest.approx(0.25, abs=1e-3)
    assert report["equal_bits"] == CACHED_SAMPLES - 1
    neighbours = [row - sum(broken < row for broken in BROKEN) for row in (8, 10)]
    seed = next(seed for seed in range(1000) if draw(CACHED_SAMPLES, 1, seed)[0] in neighbours)
    report, _ = audit(project, "--samples", "1", "--seed", str(seed), code=1)
    assert report["statement"].startswith("1 of the 3 samples compared differ")
    condition = "next: if the encoder and the sources are right, run: rm "
    remove = next(line for line in said.splitlines() if line.startswith(condition))
    for name in shlex.split(remove.removeprefix(condition)):
        Path(name).unlink()
    project.build()
    audit(project)


def test_an_image_that_changed_or_is_gone_is_named_and_no_other(built):
    without_6 = [number for number in range(SAMPLES) if number != 6]
    for numbers, replaced in ((range(SAMPLES), {"sample_006": image_bytes(99)}), (without_6, {})):
        built.has(numbers, **replaced)
        report, said = audit(built, code=1)
        assert [finding["id"] for finding in report["findings"]] == ["sample-006"]
        assert "row 6, sample-006 (shard 0)" in said
        assert report["equal_bits"] == CACHED_SAMPLES - 1


def test_another_encoder_or_an_unsealed_cache_is_refused(built):
    config = read_build(built.cache).config
    config["encoder"]["model"] = str(make_vae(built.folder / "vae", seed=1))
    write_build(built.cache, config)
    assert "encoder.weights_sha256" in audit(built, code=1)[1]
    built.lose("seal.json")
    assert str(built.cache) in audit(built, code=1)[1]


def test_a_seed_repeats_a_draw_of_whole_batches(built):
    first, said = audit(built, "--samples", "1", "--seed", "3")
    assert first["drawn"] == 1
    assert first["compared"] in (2, 3)
    assert "at most 95.00% of the 20" in said
    assert first["limits"] == str(LIMITS["float32", "cpu"])
    first, said = audit(built, "--samples", "2")
    assert f"seed        {first['seed']}" in said
    again, _ = audit(built, "--samples", "2", "--seed", str(first["seed"]))
    when = {"time": "", "seconds": 0}
    assert again | when == first | when


def test_every_sample_is_drawn_equally_often():
    assert draw(1000, 20, 5) != draw(1000, 20, 6)
    assert sorted(draw(1000, 1000, 5)) == list(range(1000))
    counts = np.bincount([number for seed in range(2000) for number in draw(5, 2, seed)], minlength=5)
    assert (np.abs(counts - 800) < 120).all()  # six standard deviations, and the seeds are fixed


DRAWS = {
    "": 7,
    "--seconds=3600": CACHED_SAMPLES,
    "--samples=5 --seconds=3600": 5,
    "--samples=1000": CACHED_SAMPLES,
}


@pytest.mark.parametrize("options", DRAWS)
def test_the_first_of_time_and_number_ends_the_draw(built, monkeypatch, options):
    """There are 20 cached samples; without an option, an audit draws 7 here."""
    monkeypatch.setattr("precompute.config.SAMPLES_DRAWN", 7)
    report, _ = audit(built, *options.split())
    assert report["drawn"] == report["asked"] == DRAWS[options]


def test_a_time_budget_stops_the_draw_and_weakens_the_statement(built):
    report, _ = audit(built, "--seconds", "1e-9")
    assert 1 <= report["drawn"] < report["asked"] == CACHED_SAMPLES
    assert f"at most {1 - 0.05 ** (1 / report['drawn']):.2%} of the 20" in report["statement"]


def test_a_full_disk_at_the_end_loses_only_the_report_file(built):
    said = built.run(main, "audit", built.cache, "--samples", "1", "--seed", "3", "--report", "/dev/full", code=2)
    assert "seed        3\n" in said
    assert "95%" in said
    assert "/dev/full" in said


def test_a_signal_ends_the_audit_with_code_3_and_a_report_so_far(built, encoding):
    def signalled(encode: Callable[..., Any], image_NYX3: Any) -> Any:
        if signal.getsignal(signal.SIGTERM) is not before:
            signal.raise_signal(signal.SIGTERM)
        return encode(image_NYX3)

    before = signal.getsignal(signal.SIGTERM)
    encoding(signalled)
    report, said = audit(built, code=3)
    assert "precompute: stopped: " in said
    assert (report["sound"], report["error"]) == (False, said.splitlines()[-1].removeprefix("precompute: stopped: "))
    assert 1 <= report["drawn"] < CACHED_SAMPLES


@pytest.mark.parametrize(("relative", "code"), [(3e-6, 0), (3e-4, 1)])
def test_an_encoder_may_round_differently_but_not_be_off(project, encoding, relative, code):
    """Other machines' float32 kernels differ by about 5e-6 of the root mean square."""
    project.build(store__dtype="float32")
    encoding(lambda encode, image: encode(image) * (1 + relative))
    report, _ = audit(project, code=code)
    assert report["equal_bits"] == 0
    assert len(report["findings"]) == (CACHED_SAMPLES if code else 0)


ROUNDING = [("float16", 2**-10, 1e6), ("bfloat16", 2**-7, 3.4e38), ("float32", 2**-23, math.inf)]


@pytest.mark.parametrize(("dtype", "step", "too_large"), ROUNDING)
def test_rounding_to_the_stored_dtype_is_no_difference(dtype, step, too_large):
    """A value that is not finite after rounding differs by infinity."""
    stored, infinite = np.ones((1, 1, 1), DTYPES[dtype]), (math.inf, math.inf)
    expected = {1 + step: (step, 0), 1 + 2 * step: (2 * step, step), too_large: infinite, math.nan: infinite}
    for value, (largest, beyond) in expected.items():
        rounded = as_read(np.full((1, 1, 1), value, np.float32), dtype)
        assert difference_of(stored, rounded, dtype, np.ones(1)) == (largest, Difference(beyond, beyond, beyond))


@pytest.mark.parametrize("axes", [("token", "feature"), ("feature", "y", "x")])
def test_differences_of_a_large_feature_are_in_its_own_unit(axes):
    """One feature of root mean square 30 among 899 of 1; that of all values is the square root of 2."""
    shape = tuple(900 if axis == "feature" else 2 for axis in axes)
    layout = SampleLayout(axes=axes, shape=shape, feature_axis="feature", has_preview=False)
    mean, std, zeros = (0.0,) * 899 + (30.0,), (1.0,) * 899 + (0.0,), (0.0,) * 900
    summary = ArraySummary(bytes=0, mean=mean, std=std, minimum=zeros, maximum=zeros, preview=None)
    units = sample_units(layout, summary)
    assert units.shape == tuple(900 if axis == "feature" else 1 for axis in axes)
    assert units.ravel().tolist() == pytest.approx([math.sqrt(1799 / 900)] * 899 + [30.0])
