"""Find samples of a cache by their rows or by their ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cache_store import Cache, JoinedCache
from cache_store.errors import ConfigError
from trainer.text.chat import Message, to_messages


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
    for word in map(str.strip, text.split(",")):
        if not word.isdecimal():
            raise ConfigError(f"rows must be whole numbers separated by commas, such as 7,3; got {word!r}")
        if int(word) >= count:
            raise ConfigError(f"rows: the cache has rows [0, {count:,}), and no row {int(word):,}")
    return [*map(int, text.split(","))]


def rows_of_ids(cache: Cache, ids: Sequence[str]) -> list[int]:
    """Find the first row of each id."""
    found = dict[str, int]()
    for shard in range(cache.spec.num_shards):
        table = cache.shards.table(shard, ["id", "row"])
        for name, row in zip(table["id"].to_pylist(), table["row"].to_pylist(), strict=True):
            if name in ids:
                found.setdefault(name, row)
        if len(found) == len(set(ids)):
            break
    if missing := [name for name in ids if name not in found]:
        raise ConfigError(f"ids: {cache.store} has no sample {', '.join(map(repr, missing))}")
    return [found[name] for name in ids]


def sample_numbers(cache: JoinedCache, rows: Sequence[int]) -> np.ndarray:
    """Find the sample number of each row; ConfigError, with the reason, for a row that a cache has rejected."""
    rejected = cache.rejected_rows()
    for row in filter(rejected.__contains__, rows):
        lacking = next(each for each in cache.caches.values() if row in each.rejected_rows())
        shard = lacking.spec.shard_of_row(row)
        reason = lacking.shards.table(shard, ["reason"])["reason"][row - lacking.spec.shard_rows(shard).start]
        raise ConfigError(f"row {row:,} of {lacking.store} was rejected ({reason}), so the cache holds no sample of it")
    return np.array(rows, np.int64) - np.searchsorted(rejected, rows)
