"""Refuse a cache or checkpoint that does not fit; builds, repairs and trainers all refuse this way.

The error has a summary, a short table (field, value found, value wanted now), and the command to run.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec

from cache_store.errors import CacheError, StaleError
from cache_store.format.layout import BUILD_FILE, COMMITS, SEAL_FILE, commit_file
from cache_store.format.schema import CommitRecord, Recipe, Seal, Spec
from cache_store.storage.store import Store

SHOWN_ROWS = 12
CELL = 36
"""Characters shown of a value; a longer one is cut to the part that differs."""

SHOWN_NAMES = 5
"""Names in a message before it says how many more there are."""

DIGEST = re.compile(r"[0-9a-f]{32,}")
DIGEST_SHOWN = 12

ABSENT = "absent"

MADE_BY = "`precompute build` or `cache-store copy` that made the cache"
"""The message names both because a cache does not record which one made it: their bytes are equal."""

SEALED_BY = (
    f"{MADE_BY} (if it was built in ranks: `precompute seal`; if samples were being withdrawn: `cache-store withdraw`)"
)

WITHDRAW_AGAIN = "samples were being withdrawn; to finish it, run the same `cache-store withdraw`, or the build"

BUILD_AGAIN = f"to finish it, rerun the {SEALED_BY}: committed shards are kept"


class Difference(NamedTuple):
    """A field whose value differs between the making of the cache (or run) and now."""

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
    """Raise StaleError: a summary, a table of differences with columns `held` and `now`, one line per remedy."""
    shown = [Difference(printable(each.field), *shorten(each.before, each.now)) for each in differences[:SHOWN_ROWS]]
    lines = [printable(summary), *align_rows([("field", held, now), *shown])]
    if (more := len(differences) - SHOWN_ROWS) > 0:
        lines.append(f"and {more:,} more")
    raise StaleError("\n  ".join([*lines, *remedies]))


def refuse_unsealed(store: Store, spec: Spec) -> None:
    if not store.has(SEAL_FILE):
        committed = sum(name.endswith(".json") for name in store.list(COMMITS))
        differences = [Difference("seal", ABSENT, "needed")]
        if committed != spec.num_shards:
            differences.append(Difference("committed shards", f"{committed:,}", f"{spec.num_shards:,} needed"))
        refuse(f"{store} is not sealed", differences, [WITHDRAW_AGAIN if is_being_withdrawn(store) else BUILD_AGAIN])


def is_being_withdrawn(store: Store) -> bool:
    try:
        return b'"withdrawing":[' in store.read(BUILD_FILE)
    except (OSError, CacheError):
        return False


def refuse_other_seal(store: Store, seal: Seal, spec: Spec) -> None:
    sealed = {"rows": seal.spec.rows, "spec digest": seal.spec.digest}
    if differences := differences_between(sealed, {"rows": spec.rows, "spec digest": spec.digest}):
        refuse(f"{store}: the seal belongs to another spec", differences, [BUILD_AGAIN], held="in the seal")


def refuse_other_recipe(store: Store, one: CommitRecord, other: CommitRecord) -> None:
    if differences := recipe_differences(one.content.recipe, other.content.recipe):
        names = [commit_file(record.content.shard) for record in (one, other)]
        remedy = "move the shards of one recipe away, and rerun the build of the other"
        refuse(f"{store} holds shards made with two different recipes", differences, [remedy], *names)


def recipe_differences(before: Recipe, now: Recipe) -> list[Difference]:
    return [] if before == now else differences_between(msgspec.to_builtins(before), msgspec.to_builtins(now))


def differences_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """List the fields whose values differ, in nested mappings too, sorted by dotted name."""
    old, new = dict(flatten(before)), dict(flatten(now))
    return [
        Difference(name, str(old.get(name, ABSENT)), str(new.get(name, ABSENT)))
        for name in sorted(old.keys() | new.keys())
        if old.get(name, ABSENT) != new.get(name, ABSENT)
    ]


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, child in value.items():
            yield from flatten(child, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, value


def abridge(names: Sequence[str], count: int | None = None, most: int = SHOWN_NAMES) -> str:
    count = len(names) if count is None else count
    shown = [name if name.isprintable() else ascii(name) for name in names[:most]]  # one line, whatever they hold
    more = f" and {count - most} more" if count > most else ""
    return ", ".join(shown) + more


def align_rows(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    cells = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shown_time(seconds: float) -> str:
    hours = seconds / 3_600
    if hours >= 1.0:
        return f"{hours:,.{1 if hours < 100.0 else 0}f} h"
    if seconds >= 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 1.0 else "under 1 s"


def shorten(before: str, now: str) -> tuple[str, str]:
    """Shorten both values: digests to their first digits, long ones to the part that differs."""
    before, now = (DIGEST.sub(lambda each: f"{each[0][:DIGEST_SHOWN]}…", printable(value)) for value in (before, now))
    if max(len(before), len(now)) <= CELL:
        return before, now
    alike = len(os.path.commonprefix([before, now]))  # noqa: RUF071 (characters are meant)
    start = max(0, alike - CELL // 3)
    return window(before, start), window(now, start)


def window(text: str, start: int) -> str:
    if len(text) <= CELL:
        return text
    return ("…" if start else "") + text[start : start + CELL] + ("…" if start + CELL < len(text) else "")


def printable(text: str) -> str:
    r"""Escape control characters, line breaks and bytes that are not UTF-8 (\xff, which Python holds as \udcff).

    Ids and names come from untrusted files.
    """
    escaped = (each if each.isprintable() else ascii(each)[1:-1].replace(r"\udc", r"\x") for each in text)
    return "".join(escaped)
