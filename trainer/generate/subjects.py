"""The images that the language model is asked about, and samples of a cache by their rows or ids."""

from collections.abc import Iterator, Sequence

import numpy as np

from cache_store import Cache, JoinedCache
from cache_store.errors import ConfigError
from cache_store.messages import printable
from trainer.data.stream import LatentSource, as_tensors
from trainer.run.figures import Subject
from trainer.text.chat import Message, to_messages


def cached_subjects(cache: JoinedCache, numbers: np.ndarray, source: LatentSource) -> Iterator[Subject]:
    """Yield samples by their numbers, each with its own first question; `source` gives the latents."""
    columns = cache.samples(numbers, ["row", "id", "conversations"]).to_pydict().values()
    for number, row, name, conversation in zip(numbers, *columns, strict=True):
        samples = {tower: each[0] for tower, each in as_tensors(source.read(np.array([number]))).items()}
        title, question = f"row {row}, {printable(name)}", first_exchange(to_messages(conversation))
        yield Subject(title, {"row": row, "id": name}, *question, samples)


def first_exchange(messages: Sequence[Message]) -> tuple[list[Message], str | None]:
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
