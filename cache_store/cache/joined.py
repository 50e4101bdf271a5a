"""Read several caches of the same samples together, such as two encoders' latents of the images, or two views of them.

They are joined by row: a joined sample is a row cached in all of them. Shard sizes, formats and rejects may differ.
"""

import hashlib
import shlex
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_store.cache.reader import Cache, captions_of, open_cache, valid_numbers
from cache_store.cache.where import numbers_where, refuse_unknown_columns
from cache_store.errors import ConfigError
from cache_store.format.tables import USUAL_COLUMNS
from cache_store.messages import differences_between, refuse
from cache_store.storage.store import Address


def open_joined(caches: Mapping[str, Cache | Address]) -> "JoinedCache":
    """Open sealed caches of one plan, each under a name of your choice.

    Raises what `open_cache` raises for each, and StaleError, with a table, if two have different plans.
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
    """Raise StaleError if the two caches have different samples, or different texts of them."""
    facts = [
        {
            "rows": each.spec.rows,
            "samples": each.spec.samples_digest,
            "withdrawn rows": ", ".join(map(str, each.withdrawn_rows().tolist())),
            "texts": each.texts_digest,
        }
        for each in (first, other)
    ]
    if differences := differences_between(*facts):
        summary = f"{first.store} and {other.store} have different plans, so their rows are not the same samples"
        program, option = ("texts", "source") if other.spec.array.text else ("build --source.kind cache", "source.path")
        command = f"precompute {program} --{option} {shlex.quote(str(first.store))} …"
        remedies = [f"to plan a cache like the first: {command}", "if the first was extended, add --extend to that"]
        if {each.field for each in differences} == {"texts"}:
            summary = f"{first.store} and {other.store} have different texts of the same samples"
            remedies = [f"to read them again: precompute captions {shlex.quote(str(other.store))}, or of the first"]
        if "withdrawn rows" in {each.field for each in differences}:
            both = shlex.join([str(first.store), str(other.store)])
            remedies = [f"to withdraw the same samples from both: cache-store withdraw {both} --ids FILE", *remedies]
        refuse(summary, differences, remedies, held="in the first", now="in the second")


class JoinedCache:
    """Sealed caches of one plan, read-only; sample numbers count the rows cached in all of them, in row order."""

    # Axes: N samples to read.

    def __init__(self, caches: Mapping[str, Cache], excluded_rows: Sequence[int] | NDArray[np.int64] = ()) -> None:
        """Join the caches; `excluded_rows` lists rows to leave out although every cache holds them."""
        self.caches = dict(caches)
        self._rejected = {name: each.rejected_rows() for name, each in self.caches.items()}
        self._lacking = np.unique(np.concatenate([*self._rejected.values(), np.asarray(excluded_rows, np.int64)]))
        self._cached_before = self._lacking - np.arange(len(self._lacking))
        """For each row left out, the number of joined samples before it."""
        self._count = self.first.spec.rows - len(self._lacking)

    def __len__(self) -> int:
        """Number of rows that are cached in every cache."""
        return self._count

    def __repr__(self) -> str:
        return f"JoinedCache({', '.join(f'{name}={str(each.store)!r}' for name, each in self.caches.items())})"

    def __reduce__(self) -> tuple[object, tuple[object]]:
        return open_joined, ({name: each.store for name, each in self.caches.items()},)

    @property
    def first(self) -> Cache:
        """The first cache; its rows, ids and conversations are those of every cache."""
        return next(iter(self.caches.values()))

    @property
    def identity(self) -> str:
        """SHA-256 over the caches' identities, independent of names and order; for one cache, its own identity."""
        identities = sorted(each.identity for each in self.caches.values())
        return identities[0] if len(identities) == 1 else hashlib.sha256("\n".join(identities).encode()).hexdigest()

    @property
    def texts_digest(self) -> str:
        """SHA-256 over the texts in force, which are those of every cache."""
        return self.first.texts_digest

    def rejected_rows(self) -> NDArray[np.int64]:
        """Return the rows that a cache lacks or that are left out, ascending."""
        return self._lacking

    def rows(self, numbers: np.ndarray) -> NDArray[np.int64]:
        """Return the plan's row of each sample number [N]."""
        numbers = valid_numbers(numbers, len(self))
        return numbers + np.searchsorted(self._cached_before, numbers, side="right")

    def read(self, numbers: np.ndarray, *, check: bool = True, normalize: bool = False) -> dict[str, np.ndarray]:
        """Read samples by joined number: each cache's name with its array [N, *shape], in the order of `numbers`.

        Options and errors are those of `Cache.read`.
        """
        return self.read_rows(self.rows(numbers), check=check, normalize=normalize)

    def read_rows(
        self, rows: NDArray[np.int64], *, check: bool = True, normalize: bool = False
    ) -> dict[str, np.ndarray]:
        """Read the samples of rows that every cache holds, in the form of `read`."""
        return {
            name: each.read(self._numbers(name, rows), check=check, normalize=normalize)
            for name, each in self.caches.items()
        }

    def mask(self, numbers: np.ndarray) -> dict[str, NDArray[np.bool_]]:
        """Read by joined number the mask of each cache that has one, by name: [N, T] each, False at padding."""
        return self.mask_rows(self.rows(numbers)) if self.has_masks else {}

    @property
    def has_masks(self) -> bool:
        """Whether any cache has texts of tokens, with a mask each."""
        return any(each.spec.array.has_mask for each in self.caches.values())

    def mask_rows(self, rows: NDArray[np.int64]) -> dict[str, NDArray[np.bool_]]:
        """Read the masks of rows that every cache holds, in the form of `mask`."""
        texts = {name: each for name, each in self.caches.items() if each.spec.array.has_mask}
        return {name: each.mask(self._numbers(name, rows)) for name, each in texts.items()}

    def null_text(self) -> dict[str, np.ndarray]:
        """Read the null prompt's sample of each cache of texts, by name: [*shape] each."""
        return {name: each.null_text() for name, each in self.caches.items() if each.spec.array.text}

    def null_mask(self) -> dict[str, NDArray[np.bool_]]:
        """Return the mask of the null prompt of each cache that has one, by name: [T] each, False at padding."""
        return {name: each.null_mask() for name, each in self.caches.items() if each.spec.array.has_mask}

    def samples(self, numbers: np.ndarray, columns: Sequence[str] = USUAL_COLUMNS) -> pa.Table:
        """Read columns by joined number, in the order of `numbers`: each from the first cache that has it.

        Row, id, uri and conversations are the same in all; width and height are in caches of images, tokens in those of
        texts.
        """
        refuse_unknown_columns("samples", columns, self.columns)
        rows, owners = self.rows(numbers), {column: self._owner(column) for column in columns}
        tables = {
            name: self.caches[name].samples(
                self._numbers(name, rows), [each for each in columns if owners[each] == name]
            )
            for name in set(owners.values())
        }
        return pa.table({column: tables[name][column] for column, name in owners.items()})

    def captions(self, numbers: np.ndarray, *, seed: int | None = None, epoch: int = 0) -> list[str | None]:
        """Return a caption of each sample by joined number, as `Cache.captions` does."""
        return captions_of(self.samples(numbers, ["conversations"]), numbers, seed, epoch)

    @property
    def columns(self) -> list[str]:
        """Columns that `samples` can return."""
        return [*dict.fromkeys(column for each in self.caches.values() for column in each.columns)]

    def where(self, expression: str) -> NDArray[np.int64]:
        """Return the joined numbers of the samples for which an expression is true, as `Cache.where` does."""
        return numbers_where(self, expression)

    def _owner(self, column: str) -> str:
        return next(name for name, each in self.caches.items() if column in each.columns)

    def _numbers(self, name: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a cache's own sample numbers for rows that it holds."""
        return rows - np.searchsorted(self._rejected[name], rows)
