"""Several caches of one plan, read together: what two encoders made of the same images, or one of two views of them.

Rows join them: a joined sample is a row that is cached in every one. Shard sizes, forms and rejects may differ.
"""

import hashlib
import shlex
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_store.cache.reader import Cache, open_cache, valid_numbers
from cache_store.errors import ConfigError
from cache_store.refusal import differing, refuse
from cache_store.storage.store import Address

PLANNED = ("row", "id", "uri", "conversations")
"""Columns that the caches have in common."""


def open_joined(caches: Mapping[str, Cache | Address]) -> "JoinedCache":
    """Open sealed caches of one plan, each under a name of your choice.

    Raises what `open_cache` raises of each, and StaleError, with a table, where two are not of one plan.
    """
    if not isinstance(caches, Mapping):
        raise ConfigError(f"give each cache to join a name, as in {{'world': …, 'siglip': …}}; got {caches!r}")
    if not caches:
        raise ConfigError("name at least one cache to join")
    opened = {name: each if isinstance(each, Cache) else open_cache(each) for name, each in caches.items()}
    first, *others = opened
    for other in others:
        refuse_other_plan(opened[first], opened[other])
    return JoinedCache(opened)


def refuse_other_plan(first: Cache, other: Cache) -> None:
    """StaleError where the caches were not planned alike."""
    plans = ({"rows": each.spec.rows, "plan digest": each.spec.plan_digest} for each in (first, other))
    if differences := differing(*plans):
        summary = f"{first.store} and {other.store} are not of one plan, so their rows are not the same samples"
        command = f"precompute build --source.kind cache --source.path {shlex.quote(str(first.store))} …"
        remedy = f"to plan a cache like the first: {command}"
        refuse(summary, differences, [remedy], held="in the first", now="in the second")


class JoinedCache:
    """Sealed caches of one plan, read-only; sample numbers are dense over the rows cached in all, in row order."""

    # Axes: N samples asked for.

    def __init__(self, caches: Mapping[str, Cache], without: Sequence[int] | NDArray[np.int64] = ()) -> None:
        """`without`: rows to leave out, though all of them hold a sample."""
        self.caches = dict(caches)
        self._rejected = {name: each.rejected_rows() for name, each in self.caches.items()}
        self._lacking = np.unique(np.concatenate([*self._rejected.values(), np.asarray(without, np.int64)]))
        self._cached_before = self._lacking - np.arange(len(self._lacking))
        """Of each row that is left out: how many joined samples come before it."""
        self._count = self.first.spec.rows - len(self._lacking)

    def __len__(self) -> int:
        """Number of rows cached in every one."""
        return self._count

    def __repr__(self) -> str:
        return f"JoinedCache({', '.join(f'{name}={str(each.store)!r}' for name, each in self.caches.items())})"

    def __reduce__(self) -> tuple[object, tuple[object]]:
        return open_joined, ({name: each.store for name, each in self.caches.items()},)

    @property
    def first(self) -> Cache:
        """The first of them: rows, ids and conversations are those of all."""
        return next(iter(self.caches.values()))

    @property
    def identity(self) -> str:
        """SHA-256 over the caches' identities, whatever their names and order; of one cache, its own identity."""
        identities = sorted(each.identity for each in self.caches.values())
        return identities[0] if len(identities) == 1 else hashlib.sha256("\n".join(identities).encode()).hexdigest()

    def rejected_rows(self) -> NDArray[np.int64]:
        """Rows that some cache lacks, or that are left out, rising."""
        return self._lacking

    def rows(self, numbers: np.ndarray) -> NDArray[np.int64]:
        """Rows of the plan of these sample numbers [N]."""
        numbers = valid_numbers(numbers, len(self))
        return numbers + np.searchsorted(self._cached_before, numbers, side="right")

    def read(self, numbers: np.ndarray, *, check: bool = True, normalize: bool = False) -> dict[str, np.ndarray]:
        """Every cache's samples by joined number, by the cache's name: [N, *shape] each, in the order asked for.

        Raises as `Cache.read` does, with the same options.
        """
        return self.read_rows(self.rows(numbers), check=check, normalize=normalize)

    def read_rows(
        self, rows: NDArray[np.int64], *, check: bool = True, normalize: bool = False
    ) -> dict[str, np.ndarray]:
        """Every cache's samples of rows that all of them hold, as `read` gives them."""
        return {
            name: each.read(self._numbers(name, rows), check=check, normalize=normalize)
            for name, each in self.caches.items()
        }

    def mask(self, numbers: np.ndarray) -> dict[str, NDArray[np.bool_]]:
        """Which tokens are a text's, by joined number, of each cache that has a mask, by its name: [N, T] each."""
        rows = self.rows(numbers)
        texts = {name: each for name, each in self.caches.items() if each.spec.array.has_mask}
        return {name: each.mask(self._numbers(name, rows)) for name, each in texts.items()}

    def samples(self, numbers: np.ndarray, columns: Sequence[str] = PLANNED) -> pa.Table:
        """Row, id, uri and conversations, or fewer, by joined number, in the order asked for."""
        if others := [name for name in columns if name not in PLANNED]:
            raise ValueError(f"{others[0]!r} is not common to joined caches; columns are {', '.join(PLANNED)}")
        return self.first.samples(self._numbers(next(iter(self.caches)), self.rows(numbers)), list(columns))

    def _numbers(self, name: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """A cache's own sample numbers of rows that it holds."""
        return rows - np.searchsorted(self._rejected[name], rows)
