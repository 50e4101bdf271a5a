"""Counting a source's samples, and drawing some of them at random, in memory that does not grow with the list."""

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

RUN = 256
"""Samples drawn in one piece, because a build reads neighbours and some sources read them together."""
RUNS = 64
"""Runs kept of a long list; only the fastest GPUs probe more, and then they probe some again."""


@dataclass(frozen=True)
class Drawn:
    """The number of samples, and some of them."""

    count: int
    runs: list[list[Mapping[str, Any]]]
    """Runs in random order; each holds neighbouring samples in the source's order."""

    def batches(self, size: int) -> list[list[Mapping[str, Any]]]:
        """Cut the runs into batches of `size`; if there is no full batch, return one smaller batch."""
        cut = [run[start : start + size] for run in self.runs for start in range(0, len(run), size)]
        return [batch for batch in cut if len(batch) == size] or cut[:1]


def draw(samples: Iterable[Mapping[str, Any]], batch_size: int, seed: int = 0) -> Drawn:
    """Read all samples once and keep a random choice of runs, each run with the same probability."""
    generator, runs, count = random.Random(seed), list[list[Mapping[str, Any]]](), 0
    for number, run in enumerate(runs_of(samples, -(-RUN // batch_size) * batch_size)):
        count += len(run)
        place = generator.randint(0, number)  # Vitter's algorithm R, with the first runs in random order too
        if number < RUNS:
            runs.insert(place, run)
        elif place < RUNS:
            runs[place] = run
    return Drawn(count, runs)


def runs_of(samples: Iterable[Mapping[str, Any]], length: int) -> Iterator[list[Mapping[str, Any]]]:
    each = iter(samples)
    while run := list(islice(each, length)):
        yield run
