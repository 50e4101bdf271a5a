"""The one way in which a build, a repair or a trainer refuses a cache or a checkpoint that does not fit.

A summary of what does not fit, a short table (field, what is held, what is asked now), and the command that fits.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec

from cache_store.errors import StaleError
from cache_store.format.names import COMMITS, SEAL_FILE, commit_file
from cache_store.format.schema import CommitRecord, Recipe, Seal, Spec
from cache_store.storage.store import Store

SHOWN_ROWS = 12
CELL = 36
"""Longest value that a table shows; of longer ones, the place where they differ."""

DIGEST = re.compile(r"[0-9a-f]{32,}")
DIGEST_SHOWN = 12

ABSENT = "absent"

MADE_BY = "`precompute build`, `cache-store convert` or `cache-store copy` that made the cache"
"""Nothing in a cache tells which: a conversion or a copy gives the bytes of a build."""

SEALED_BY = f"{MADE_BY} (after ranks: `precompute seal`)"

BUILD_AGAIN = f"to finish it, rerun the {SEALED_BY}: what is committed is kept"


class Difference(NamedTuple):
    """One field: as it was when the cache (or the run) was made, and as it is now."""

    field: str
    before: str
    now: str


def refuse(
    summary: str,
    differences: Sequence[Difference],
    remedies: Sequence[str],
    held: str = "in the cache",
    now: str = "now",
) -> NoReturn:
    """StaleError of a summary, the table of differences under `held` and `now`, and a line for each remedy."""
    shown = [Difference(printable(each.field), *shorten(each.before, each.now)) for each in differences[:SHOWN_ROWS]]
    lines = [printable(summary), *aligned([("field", held, now), *shown])]
    if (more := len(differences) - SHOWN_ROWS) > 0:
        lines.append(f"and {more:,} more")
    raise StaleError("\n  ".join([*lines, *remedies]))


def refuse_unsealed(store: Store, spec: Spec) -> None:
    """StaleError where the build has not come to its end."""
    if not store.has(SEAL_FILE):
        committed = sum(name.endswith(".json") for name in store.list(COMMITS))
        differences = [Difference("seal", ABSENT, "needed")]
        if committed != spec.num_shards:
            differences.append(Difference("committed shards", f"{committed:,}", f"{spec.num_shards:,} needed"))
        refuse(f"{store} is not sealed", differences, [BUILD_AGAIN])


def refuse_other_seal(store: Store, seal: Seal, spec: Spec) -> None:
    """StaleError where the seal was made of another spec than the one that the folder has."""
    sealed = {"rows": seal.planned, "spec digest": seal.spec_digest}
    if differences := differing(sealed, {"rows": spec.rows, "spec digest": spec.digest}):
        refuse(f"{store}: the seal belongs to another spec", differences, [BUILD_AGAIN], held="in the seal")


def refuse_other_recipe(store: Store, one: CommitRecord, other: CommitRecord) -> None:
    """StaleError where two shards of a cache were made with two recipes."""
    if differences := recipe_differences(one.content.recipe, other.content.recipe):
        names = [commit_file(record.content.shard) for record in (one, other)]
        remedy = "move the shards of one of them away, and run the build of the other again"
        refuse(f"{store} holds shards of two recipes", differences, [remedy], *names)


def recipe_differences(before: Recipe, now: Recipe) -> list[Difference]:
    """Field by field."""
    return [] if before == now else differing(msgspec.to_builtins(before), msgspec.to_builtins(now))


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Every field, of nested mappings and lists too, whose values are not equal."""
    old, new = dict(flatten(before)), dict(flatten(now))
    return [
        Difference(name, str(old.get(name, ABSENT)), str(new.get(name, ABSENT)))
        for name in sorted(old.keys() | new.keys())
        if old.get(name, ABSENT) != new.get(name, ABSENT)
    ]


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as one, keys joined by dots."""
    if isinstance(value, Mapping):
        for name, child in value.items():
            yield from flatten(child, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, value


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines of aligned text."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    cells = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]


def counted(number: int, noun: str) -> str:
    """As `1 shard` and `2,000 shards`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shorten(before: str, now: str) -> tuple[str, str]:
    """Both values, digests and long texts cut to what tells them apart."""
    before, now = (DIGEST.sub(lambda each: f"{each[0][:DIGEST_SHOWN]}…", printable(value)) for value in (before, now))
    if max(len(before), len(now)) <= CELL:
        return before, now
    start = max(0, common_length(before, now) - CELL // 3)
    return window(before, start), window(now, start)


def common_length(left: str, right: str) -> int:
    """Characters until the first that differs."""
    shorter = min(len(left), len(right))
    return next((place for place in range(shorter) if left[place] != right[place]), shorter)


def window(text: str, start: int) -> str:
    """CELL characters from `start`, dots where something is left out; all of a short text."""
    if len(text) <= CELL:
        return text
    return ("…" if start else "") + text[start : start + CELL] + ("…" if start + CELL < len(text) else "")


def printable(text: str) -> str:
    """On one line and without control characters: ids and names come from others' files."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
