"""The result of an audit: how samples differ from their images encoded again, and what that says of the others."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import ceil

import numpy as np

from cache_store.cache.writer import Outcome
from cache_store.format.array import StoreDtype
from cache_store.format.layout import SEAL_FILE, commit_file
from cache_store.format.quantized import as_read, steps
from cache_store.messages import align_rows, counted
from precompute.encode.tolerance import DeviceClass, Difference, Limits


@dataclass(frozen=True, kw_only=True)
class LatentDifference:
    """The difference between two latents of one image, each rounded to the stored dtype."""

    largest: float
    """Largest absolute difference of a value; infinite if the new latent is not finite."""
    beyond_rounding: Difference
    """The differences beyond what rounding can add to a stored value."""
    equal_bits: bool


@dataclass(frozen=True, kw_only=True)
class ComparedSample:
    """A cached sample, compared with its image encoded again."""

    number: int
    """Sample number, as `cache.read` takes it."""
    shard: int
    row: int
    id: str
    limits: Limits
    """The differences allowed, beyond rounding."""
    difference: LatentDifference | None
    """The difference found; None if the image could not be compared."""
    source_problem: str | None
    """Why the image could not be compared: it is gone, changed or no longer decodable; None if it could."""

    @property
    def problem(self) -> str | None:
        """Return the problem with this sample; None if it matches."""
        if self.difference is None or self.limits.admit(self.difference.beyond_rounding):
            return self.source_problem
        return f"its latent differs by {self.difference.beyond_rounding}; the limit is {self.limits}"


def differences(
    cached: np.ndarray, encoded: np.ndarray, dtype: StoreDtype, units: np.ndarray
) -> Iterator[LatentDifference]:
    """Compare stored latents of `dtype` with float32 latents, rounding the float32 latents to `dtype` first.

    `units` are those of `sample_units`. Rounding moves a value by at most half a step of `dtype`, so it adds at
    most one step to a difference.
    """
    for stored, rounded in zip(cached, as_read(encoded, dtype), strict=True):
        known = np.where(np.isfinite(rounded), rounded, stored)
        step = np.maximum(*(steps(each[None], dtype)[0] for each in (stored, known))).astype(np.float64)
        distance = np.abs(stored.astype(np.float64) - known.astype(np.float64))
        distance[~np.isfinite(rounded)] = np.inf
        yield LatentDifference(
            largest=float(distance.max()),
            beyond_rounding=Difference.of(np.maximum(distance - step, 0.0) / units),
            equal_bits=stored.tobytes() == rounded.tobytes(),
        )


def source_problem(content_sha256: str, outcome: Outcome) -> str | None:
    """Say why the image is not the one that was encoded; None if it is."""
    if outcome.content_sha256 is None:
        return f"its image is gone: {outcome.reason}"
    if outcome.content_sha256 != content_sha256:
        return f"its image changed: sha256 is {outcome.content_sha256[:12]}…, was {content_sha256[:12]}…"
    return outcome.reason  # same bytes, but this version of a library cannot decode them


CONFIDENCE = 0.95

SHOWN_FINDINGS = 50


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The result of one audit: whole batches are compared, and some of their samples were drawn at random."""

    cache: str
    identity: str
    seed: int
    seconds: float
    device: str
    versions: dict[str, str]
    built_on: tuple[str, ...]
    """Devices that encoded the shards read."""
    built_with: tuple[dict[str, str], ...]
    """Library versions in those shards' records."""
    made_by: tuple[str, ...]
    """Different combinations of hardware and libraries that made those shards."""
    device_class: DeviceClass
    """The loosest class of all these devices; it chooses the limits, with the compute dtype."""
    compute_dtype: str
    store_dtype: str
    limits: Limits
    """The differences allowed, in units of the root mean square; the loosest among the shards read."""
    root_mean_square: float
    """Root mean square of the cache's latents."""
    samples: int
    """Cached samples in the whole cache."""
    asked: int
    """Number of samples to draw."""
    drawn: tuple[ComparedSample, ...]
    compared: tuple[ComparedSample, ...]

    @cached_property
    def findings(self) -> list[ComparedSample]:
        """Return the samples that differ by more than their tolerance or have another image now, by row."""
        return sorted((each for each in self.compared if each.problem), key=lambda each: each.row)

    @cached_property
    def largest(self) -> list[tuple[float, ComparedSample]]:
        """Return the largest difference of each sample that could be compared, in rising order."""
        found = [(each.difference.largest, each) for each in self.compared if each.difference is not None]
        return sorted(found, key=lambda pair: pair[0])

    @property
    def equal_bits(self) -> int:
        return sum(each.difference is not None and each.difference.equal_bits for each in self.compared)

    @property
    def is_exhaustive(self) -> bool:
        return len(self.compared) == self.samples

    @property
    def bound(self) -> float | None:
        """Return the largest share of cached samples that may be wrong; None if some of those drawn are.

        It is exact if all were compared. Otherwise, if a share of 1 - 0.05 ** (1 / n) were wrong, a draw of n samples
        would have one in 95 of 100 draws.
        """
        if self.is_exhaustive:
            return len(self.findings) / self.samples
        return None if self.num_wrong_drawn else 1 - (1 - CONFIDENCE) ** (1 / len(self.drawn))

    @property
    def num_wrong_drawn(self) -> int:
        return sum(each.problem is not None for each in self.drawn)

    @property
    def statement(self) -> str:
        beyond = f"differ by more than the limits and rounding to {self.store_dtype}"
        if any(each.difference is None for each in self.findings):
            beyond += ", or their image is not the encoded one"
        if self.is_exhaustive:
            return f"all {self.samples:,} cached samples were compared: {len(self.findings):,} {beyond}"
        if self.bound is None:
            share = f"{self.num_wrong_drawn / len(self.drawn):.2%}"
            return f"{self.num_wrong_drawn:,} of the {len(self.drawn):,} samples drawn ({share}) {beyond}"
        share = f"at most {self.bound:.2%} of the {self.samples:,} cached samples"
        return f"with {CONFIDENCE:.0%} confidence {share} {beyond}"

    def quantile(self, share: float) -> float | None:
        """Return the `share` quantile of the samples' largest differences; None if there are none."""
        return self.largest[max(ceil(share * len(self.largest)) - 1, 0)][0] if self.largest else None

    def as_dict(self, error: str | None = None) -> dict[str, object]:
        """Return the fields of a report file; `error` says why not all samples asked for were drawn."""
        return {
            "sound": error is None and not self.findings,
            "error": error,
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "limits": asdict(self.limits),
            "drawn": len(self.drawn),
            "compared": len(self.compared),
            "equal_bits": self.equal_bits,
            "worst": asdict(self.largest[-1][1]) if self.largest else None,
            "median": self.quantile(0.5),
            "percentile_99": self.quantile(0.99),
            "confidence": 1.0 if self.is_exhaustive else CONFIDENCE,
            "bound": self.bound,
            "statement": self.statement,
            "findings": [asdict(each) | {"problem": each.problem} for each in self.findings],
            "next": list(next_steps(self)),
        }


def audit_lines(report: AuditReport) -> list[str]:
    """Format the report: its conditions, the findings, the statement, the next steps."""
    lines = align_rows(list(report_fields(report)))
    lines += [
        f"row {each.row}, {each.id} (shard {each.shard}): {each.problem}" for each in report.findings[:SHOWN_FINDINGS]
    ]
    if (more := len(report.findings) - SHOWN_FINDINGS) > 0:
        lines.append(f"and {more:,} more; --report FILE writes them all")
    return [*lines, report.statement, *(f"next: {step}" for step in next_steps(report))]


def report_fields(report: AuditReport) -> Iterator[tuple[str, str]]:
    """Yield names and values of the report's first lines."""
    yield "seed", str(report.seed)
    yield "drawn", f"{len(report.drawn):,} of {report.samples:,} cached samples"
    where = f"on {report.device} in {report.seconds:.0f} s, built on {', '.join(report.built_on)}"
    yield "compared", f"{counted(len(report.compared), 'sample')}, the planned batches of those drawn, {where}"
    for maker in report.made_by if len(report.made_by) > 1 else ():
        yield "made by", maker
    yield "equal bits", f"{report.equal_bits:,} of {len(report.compared):,}"
    if report.largest:
        difference, worst = report.largest[-1]
        yield "worst", f"{difference:.3g} (row {worst.row}, {worst.id})"
        yield "typical", f"median {report.quantile(0.5):.3g}, 99th percentile {report.quantile(0.99):.3g}"
    entry = f"{report.compute_dtype}, {report.device_class}"
    yield "limits", f"{report.limits}, of the latents' root mean square {report.root_mean_square:.3g} ({entry})"


def next_steps(report: AuditReport) -> Iterator[str]:
    """Yield the steps to take after findings."""
    if shards := sorted({each.shard for each in report.findings if each.difference is not None}):
        names = [f"{report.cache}/{name}" for name in (SEAL_FILE, *(commit_file(shard) for shard in shards))]
        yield f"if the encoder and the sources are right, run: rm {shlex.join(names)}"
        yield (
            "rerun the `precompute build` that made the cache: it encodes these shards again. The cache gets a new "
            "identity, so restart training. If the seal stays, the build accepts only the sealed bytes"
        )
    if any(each.difference is None for each in report.findings):
        yield "restore the original images, or build a new cache; changed images cannot go into this one"
