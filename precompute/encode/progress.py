"""The progress shown during a build, and the counts that decide whether it goes on."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from cache_store.format.schema import CommitRecord
from cache_store.format.tables import WITHDRAWN
from cache_store.log import log_warning
from cache_store.messages import counted
from cache_store.program.progress_bar import ProgressBar
from precompute.encode.job import REMEDIES, MismatchedShard, Progress, slowest
from precompute.images.rejected import TooManyRejectsError
from precompute.inputs.busy import Part

ADVISED_S = 60.0
"""Seconds of a build from which advice is given; much of a shorter one is starting, and checking the device."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Counts and rates of what one process has built."""

    shards: int
    images: int
    """Images, or texts."""
    images_per_s: float
    made_of: str
    """`image` or `text`."""
    working_share: float
    """Share of the time that the encoder worked; otherwise it waited for images, its turn or the writer."""
    gpu_use: float | None
    """Mean share of time in which the GPUs were busy, by NVML; None without a reading."""
    slowest: Part | None
    """The part that held the others back; None if nothing was encoded."""
    advice: str

    def __str__(self) -> str:
        done = f"encoded {counted(self.images, self.made_of)} in {counted(self.shards, 'shard')}"
        if self.slowest is None:
            return done
        speed = f"{self.images_per_s:.1f} {self.made_of}s/s, the encoder worked {self.working_share:.0%} of the time"
        if self.gpu_use is not None:
            speed += f" and the GPU was busy {self.gpu_use:.0%}"
        if self.images < self.images_per_s * ADVISED_S:
            return f"{done}, {speed}"
        return f"{done}, {speed}; {self.slowest} was slowest: {self.advice}"


def warn_of_other_build(committed: CommitRecord) -> None:
    run = committed.run
    log_warning(
        f"shard {committed.content.shard}, which this build encoded, was committed meanwhile on {run.host}: another "
        "build of this cache seems to run, and both encode everything. Stop one, or use `precompute plan` and ranks"
    )


class BuildProgress:
    """Counts images and shows a bar; close it. Raises TooManyRejectsError once more are rejected than allowed."""

    def __init__(
        self,
        planned: int,
        committed: Iterable[CommitRecord],
        max_reject_fraction: float,
        *,
        to_build: int | None = None,
        shared: bool = False,
        made_of: str = "image",
        compute_dtype: str = "bfloat16",
    ) -> None:
        self._planned, self._made_of, self._compute_dtype = planned, made_of, compute_dtype
        self._allowed = max_reject_fraction
        self._reasons: Counter[str] = Counter()
        contents = [record.content for record in committed]
        done = 0 if shared else sum(content.cached + content.rejected for content in contents)  # not other ranks'
        total = planned if to_build is None else done + to_build
        idle = to_build == 0  # if the cache is only sealed, say
        self._bar = ProgressBar("encode", total, made_of, done=done, delay_s=0.0, hidden=idle)
        self.close = self._bar.close
        self._elapsed_s, self.busy_s = 0.0, defaultdict[Part, float](float)
        self._gpu_use, self._readings = 0.0, 0
        """The sum of the GPUs' readings, and their number."""
        self._started = time.monotonic()
        self._counting = threading.Lock()
        self.images = 0
        self.built: dict[int, CommitRecord] = {}
        """Commit records of the shards built, by shard."""
        self.mismatched: dict[int, MismatchedShard] = {}
        self._shared, self._is_alone = shared, True
        for content in contents:
            self._reasons.update(content.reasons)

    def __call__(self, progress: Progress) -> None:
        """Count a step; called from several threads."""
        with self._counting:
            self._count(progress)

    def _count(self, progress: Progress) -> None:
        self.images += progress.samples
        self._elapsed_s += progress.elapsed_s
        self._gpu_use, self._readings = self._gpu_use + sum(progress.gpu_use), self._readings + len(progress.gpu_use)
        for busy, seconds in progress.busy_s.items():
            self.busy_s[busy] += seconds
        if progress.committed is not None:
            content = progress.committed.content
            self.built[content.shard] = progress.committed
            if progress.is_others and self._is_alone and not self._shared:
                self._is_alone = False
                warn_of_other_build(progress.committed)
            self._reasons.update(content.reasons)
            self.refuse_too_many_rejects()
        if progress.mismatched is not None:
            self.mismatched[progress.mismatched.shard] = progress.mismatched
        part = slowest(self.busy_s)
        held_back = f", {part} slowest" if part else ""
        shown = f"{self._reasons.total()} rejected, encoder works {self.working_share:.0%}{held_back}"  # cut at its end
        self._bar.update(progress.samples, shown, {"rejected": self._reasons.total(), "slowest": part})

    @property
    def working_share(self) -> float:
        return self.busy_s["encoding"] / self._elapsed_s if self._elapsed_s else 0.0

    @property
    def encoded(self) -> Encoded:
        """Return the counts and rates so far."""
        part = slowest(self.busy_s)
        advice = REMEDIES[part] if part else ""
        if part == "encoding" and all(record.run.device == "cpu" for record in self.built.values()):
            advice = "a GPU helps"
        if part == "encoding" and self._compute_dtype == "float32":
            advice += ", or a cache of encoder.compute_dtype: bfloat16"
        return Encoded(
            shards=len(self.built),
            images=self.images,
            images_per_s=self.images / max(time.monotonic() - self._started, 1e-9),
            made_of=self._made_of,
            working_share=self.working_share,
            gpu_use=self._gpu_use / self._readings if self._readings else None,
            slowest=part,
            advice=advice,
        )

    @property
    def is_all_rejected(self) -> bool:
        return self._reasons.total() == self._planned

    def refuse_too_many_rejects(self) -> None:
        reasons = self._reasons - Counter({WITHDRAWN: self._reasons[WITHDRAWN]})
        rejected = reasons.total()
        if rejected > self._allowed * self._planned:
            why = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            raise TooManyRejectsError(
                f"{rejected} of {self._planned} samples rejected ({why}), more than run.max_reject_fraction "
                f"{self._allowed:g} allows"
            )
