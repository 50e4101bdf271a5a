"""Find samples of a cache by their rows or by their ids."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cache_store import Cache, JoinedCache
from cache_store.errors import ConfigError
from cache_store.format.tables import CACHED
from trainer.text.chat import Message, to_messages
from trainer.text.store import held_out
from trainer.text.writer import id_hash


@dataclass(frozen=True)
class CachedSample:
    """A sample of a cache, with its question and reference answer."""

    number: int
    row: int
    id: str
    question: list[Message]
    """All messages before the assistant's first one."""
    reference: str | None
    """The assistant's first message; None if there is none."""

    def is_held_out(self, val_fraction: float) -> bool:
        """Return whether a run that held out this share has not trained on it."""
        return bool(held_out(np.array(id_hash(self.id), np.uint64), val_fraction))


def chosen_samples(cache: JoinedCache, rows: str | None, ids: str | None) -> list[CachedSample]:
    """Find the samples of comma-separated rows or ids, in their order; ConfigError for one that is not cached."""
    first = cache.first
    wanted = row_numbers(rows, first.spec.rows) if rows is not None else rows_of_ids(first, (ids or "").split(","))
    return cached_samples(cache, sample_numbers(cache, wanted))


def cached_samples(cache: JoinedCache, numbers: np.ndarray) -> list[CachedSample]:
    """Read row, id, question and reference of samples, by their numbers."""
    columns = cache.samples(numbers, ["row", "id", "conversations"]).to_pydict().values()
    return [
        CachedSample(int(number), row, name, *first_exchange(to_messages(conversation)))
        for number, row, name, conversation in zip(numbers, *columns, strict=True)
    ]


def first_exchange(messages: Sequence[Message]) -> tuple[list[Message], str | None]:
    """Split a conversation at the assistant's first message."""
    spoken = next((turn for turn, each in enumerate(messages) if each["role"] == "assistant"), None)
    question = list(messages[:spoken]) or [{"role": "user", "content": ""}]
    return question, None if spoken is None else messages[spoken]["content"]


def row_numbers(text: str, count: int) -> list[int]:
    """Parse `7,3` as rows. Raise ConfigError for one that is not in [0, count)."""
    rows = list[int]()
    for word in text.split(","):
        if not word.strip().isdecimal():
            raise ConfigError(f"rows must be whole numbers separated by commas, such as 7,3; got {word.strip()!r}")
        if int(word) >= count:
            raise ConfigError(f"rows: the cache has rows [0, {count:,}), and no row {int(word):,}")
        rows.append(int(word))
    return rows


def rows_of_ids(cache: Cache, ids: Sequence[str]) -> list[int]:
    """Find the row of each id; read samples tables until all are found."""
    found = dict[str, int]()
    for name, row in every_id(cache):
        if name in ids:
            found.setdefault(name, row)
            if len(found) == len(set(ids)):
                break
    if missing := [name for name in ids if name not in found]:
        raise ConfigError(f"ids: {cache.store} has no sample {', '.join(map(repr, missing))}")
    return [found[name] for name in ids]


def every_id(cache: Cache) -> Iterator[tuple[str, int]]:
    for shard in range(cache.spec.num_shards):
        table = cache.shards.table(shard, ["id", "row"])
        yield from zip(table["id"].to_pylist(), table["row"].to_pylist(), strict=True)


def sample_numbers(cache: JoinedCache, rows: Sequence[int]) -> np.ndarray:
    """Find the sample number of each row; ConfigError, with the reason, for a row that a cache has rejected."""
    rejected = cache.rejected_rows()
    for row in rows:
        if row in rejected:
            raise ConfigError(rejection_of(cache, row))
    return np.array(rows, np.int64) - np.searchsorted(rejected, rows)


def rejection_of(cache: JoinedCache, row: int) -> str:
    lacking = next(each for each in cache.caches.values() if row in each.rejected_rows())
    shard = lacking.spec.shard_of_row(row)
    reasons = lacking.shards.table(shard, ["row", "status", "reason"]).to_pylist()
    (reason,) = [each["reason"] for each in reasons if each["row"] == row and each["status"] != CACHED]
    return f"row {row:,} of {lacking.store} was rejected ({reason}), so the cache holds no sample of it"
