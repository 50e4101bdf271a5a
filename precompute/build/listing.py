"""List a source as tables: the samples of one part of the plan after the other, each part in memory.

Samples keep the source's order: that of a list's records, of the rows of files, and of sorted names in a folder.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cache_store.errors import SourceError
from cache_store.format.plan import caption_of
from cache_store.format.tables import EXTRA_TYPES, NO_VALUES, PLAN_SCHEMA, PLANNED, REAL, TEXTS_SCHEMA, WHOLE
from cache_store.log import log_info, log_warning
from cache_store.messages import abridge, counted, printable
from cache_store.storage.store import is_url, split_url
from precompute.config import BuildConfig
from precompute.images.rejected import CONTINUE
from precompute.sources.config import SOURCES, SourceConfig
from precompute.sources.image_store import folder_below, is_unsafe
from precompute.sources.images import ALL, Names
from precompute.sources.listing import Samples
from precompute.sources.place import MISSING

LISTED = pa.schema([*(each for each in PLAN_SCHEMA if each.name != "size"), *TEXTS_SCHEMA])
"""The columns of listed samples; extra columns follow."""

NO_IDS = pa.array([], pa.string())

NOTHING: Mapping[int, int] = MappingProxyType({})

Bare = tuple[str, str]
"""Id and uri of a sample that has no image or no text."""

CHUNK = 8_192
"""Samples held as Python objects at a time."""

MAX_ID_BYTES = 2**14
"""An id stands in the plan, in a samples table and in messages; the longest path of a file has 4 KB."""

MOST_TEXT = 2**31 - 1
"""Most characters of a part's texts: those of one column of a table. A caption takes some hundred bytes."""


class ListedParts:
    """Iterates over a source's samples, a table of each part, and counts those without their image or text."""

    def __init__(
        self,
        list_part: Callable[[Names], Samples],
        names: Sequence[Names],
        config: BuildConfig,
        withdrawn: pa.Array = NO_IDS,
        unchanged: Mapping[int, int] = NOTHING,
    ) -> None:
        """`names` has an entry for each part; `[ALL]` is one list, cut every `rows_per_part` samples.

        Samples of the ids `withdrawn` are passed over. Parts that are `unchanged`, of so many rows, are not listed.
        """
        self._list_part, self.names, self._config, self._withdrawn = list_part, names, config, withdrawn
        self.where, self.rows, self.unchanged = f"source.path: {config.source.path}", sum(unchanged.values()), unchanged
        self._seen: Samples | None = None
        self._bare, self.with_bare = list[Bare](), set[Names]()

    @property
    def rows_per_part(self) -> int:
        return self._config.store.rows_per_part

    @property
    def is_cut(self) -> bool:
        """Whether the source says which samples are a part."""
        return self.names != [ALL]

    def __iter__(self) -> Iterator[pa.Table]:
        """Raise SourceError for a sample that no plan can hold, and if there are none."""
        for names in (names for number, names in enumerate(self.names) if number not in self.unchanged):
            yield from self.tables(names)
        if not self.rows:
            raise SourceError("; ".join(filter(None, [f"{self.where} holds no samples", self._note])))

    def tables(self, names: Names) -> Iterator[pa.Table]:
        """List an entry of `names`: one table, perhaps empty, or those of a list that is cut."""
        samples = self._list_part(names)
        self._seen = samples.behind(self._seen)
        rest, most = iter(samples), None if self.is_cut else self.rows_per_part
        for number in count():
            part = make_table(islice(rest, most), samples.extra, self.where)
            if not part.num_rows and (number or not self.is_cut):
                break
            refuse_long_ids(part, self.where)
            if len(self._withdrawn):
                part = part.filter(pc.invert(pc.is_in(part["id"], self._withdrawn)))
            self.count(names, part.num_rows, self.bare_of(part))
            yield part
            if self.is_cut:
                break

    def count(self, names: Names, rows: int, bare: Sequence[Bare]) -> None:
        """Count the samples of a part, listed now or by another process."""
        self.rows += rows
        self._bare += bare
        self.with_bare |= {names} if bare else set()

    def bare_of(self, part: pa.Table) -> list[Bare]:
        """Return the samples of a part without what is encoded of them."""
        if self._config.source.text:
            turns = (each for chunk in part["conversations"].chunks for each in chunk.to_pylist())
            is_bare = pa.array((each is not None and caption_of(each) is None for each in turns), pa.bool_())
        else:
            is_bare = pc.fill_null(pc.equal(part["fingerprint"], MISSING), False)
        bare = part.filter(is_bare)
        return [*zip(bare["id"].to_pylist(), bare["uri"].to_pylist(), strict=True)]

    @property
    def _note(self) -> str:
        return self._seen.note if self._seen else ""

    @property
    def has_missing_images(self) -> bool:
        """Whether images are missing, which may come back; a text stands in the plan, and does not."""
        return not self._config.source.text and bool(self._bare)

    def refuse_bare(self) -> None:
        """Raise SourceError if too many samples lack their image or text, before an hour of encoding."""
        bare, allowed, source = self._bare, self._config.run.max_reject_fraction, self._config.source
        if len(bare) <= allowed * self.rows:
            return
        more = f"That is more than run.max_reject_fraction {allowed:g} allows; nothing was encoded."
        if source.text:
            raise SourceError(
                f"{len(bare)} of {self.rows} samples of {source.path} without a {source.text}: "
                f"{abridge([name for name, _ in bare])}. {more} {SOURCES[source.kind].add_texts}; {CONTINUE}"
            )
        reasons, advice = zip(*why_missing(bare, source), strict=True)
        raise SourceError(
            f"{len(bare)} of {self.rows} samples without their {self._config.media.name}: {'; '.join(reasons)}. "
            f"{more} {'. '.join(advice)}; {CONTINUE}"
        )

    def say(self) -> None:
        """Tell of the source's other files, of masks and of missing captions."""
        if self._note:
            log_info(printable(self._note))
        for warning in self._seen.warnings(SOURCES[self._config.source.kind].add_texts) if self._seen else ():
            log_warning(printable(warning))


def make_table(samples: Iterable[Mapping[str, Any]], extra: Sequence[str], where: str) -> pa.Table:
    """Make one table of all samples; raise SourceError if their texts would fill the memory."""
    batches, columns, held, rest = list[pa.RecordBatch](), ExtraColumns(extra, where), 0, iter(samples)
    for chunk in iter(lambda: [*islice(rest, CHUNK)], []):
        batches.append(pa.RecordBatch.from_pylist(chunk, schema=LISTED))
        columns.add(chunk)
        held += batches[-1]["conversations"].nbytes
        if held > MOST_TEXT:
            raise SourceError(
                f"{where}: the texts of a part of the plan take more than {MOST_TEXT:,} bytes, up to sample "
                f"{abridge([chunk[-1]['id']])}; cut the texts, or set a smaller store.rows_per_part"
            )
    table = pa.Table.from_batches(batches, LISTED)
    table = with_column(table, "state", pc.fill_null(table["state"], PLANNED))
    for name, values in columns.arrays():
        table = with_column(table, name, values)
    return table


def with_column(table: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Set the values of a column, or append it."""
    if name not in table.column_names:
        return table.append_column(name, values)
    place = table.column_names.index(name)
    return table.set_column(place, table.schema.field(place), values.cast(table.schema.field(place).type))


def joined(tables: Sequence[pa.Table]) -> pa.Table:
    """Join tables of a list; raise SourceError if an extra column is of two kinds."""
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
        raise SourceError(f"source.fields.extra: the values of a column must be of one kind: {error}") from None


class ExtraColumns:
    """The fields that a part's samples have beside their texts; a column has the type that its values share."""

    def __init__(self, names: Sequence[str], where: str) -> None:
        self._where = where
        self._values: dict[str, list[object]] = {name: [] for name in names}
        self._kinds: dict[str, dict[str, str]] = {name: {} for name in names}
        """For each column, the kinds of its values, each with the first sample that has it."""

    def add(self, samples: Iterable[Mapping[str, Any]]) -> None:
        """Add the fields of samples; raise SourceError for a value that a plan cannot hold.

        A number that is not finite counts as absent.
        """
        if self._values:
            for sample in samples:
                for name, values in self._values.items():
                    values.append(self._checked(sample["id"], name, sample["extra"].get(name)))

    def _checked(self, sample: str, name: str, value: object) -> object:
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return None
        if (kind := kind_of(value)) is None:
            kinds = ", ".join(kind for kind in EXTRA_TYPES if kind != NO_VALUES)
            wanted = "one in [-2^63, 2^63)" if isinstance(value, int) else f"{kinds}, or null"
            raise SourceError(
                f"{self._where}: source.fields.extra: {name} of sample {abridge([sample])} is {type(value).__name__} "
                f"{abridge([repr(value)[:40]])}; expected {wanted}"
            )
        self._kinds[name].setdefault(kind, sample)
        return value

    def arrays(self) -> Iterator[tuple[str, pa.Array]]:
        """Yield each column; raise SourceError for one whose values are of two kinds."""
        for name, values in self._values.items():
            kinds = self._kinds[name]
            if {*kinds} == {WHOLE, REAL}:
                kinds = {REAL: ""}
                values = [None if value is None else float(value) for value in values]  # type: ignore[arg-type]
            if len(kinds) > 1:
                found = " and ".join(f"{kind} (sample {abridge([sample])})" for kind, sample in kinds.items())
                raise SourceError(
                    f"{self._where}: source.fields.extra: {name} is {found}; its values must be of one kind"
                )
            yield name, pa.array(values, EXTRA_TYPES[next(iter(kinds), NO_VALUES)])


def kind_of(value: object) -> str | None:
    """Return the key in EXTRA_TYPES of a value, or None if a plan cannot hold it."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, str):
        return "text"
    if isinstance(value, float):
        return REAL
    if isinstance(value, int):
        return WHOLE if -(2**63) <= value < 2**63 else None
    is_texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return "a list of texts" if is_texts else None


def refuse_long_ids(part: pa.Table, where: str) -> None:
    lengths = pc.binary_length(part["id"])
    if (longest := pc.max(lengths).as_py() or 0) > MAX_ID_BYTES:
        begins = part["id"][pc.index(lengths, longest).as_py()].as_py()[:20]
        raise SourceError(
            f"{where}: a sample id of {longest:,} bytes, more than {MAX_ID_BYTES:,}, begins {abridge([begins])}"
        )


def why_missing(missing: Sequence[Bare], source: SourceConfig) -> Iterator[tuple[str, str]]:
    """Yield each reason why images are missing, and what to do about it."""
    unnamed, named = [name for name, uri in missing if not uri], [uri for _, uri in missing if uri]
    if named:
        is_list = not SOURCES[source.kind].images_are
        where = source.images or (folder_of(source.path) if is_list else source.path)
        shown = where if is_url(where) else Path(where).expanduser().resolve()  # "." would read as a full stop
        mend = f"Mend {shown}"
        if is_list:
            below = None if is_url(where) else folder_below(Path(where), named[0])
            mend = f"Set source.images to {below}, where they are" if below else "Set source.images, or mend it"
        outside = [name for name in named if is_unsafe(name)]
        why = f"; not a name inside it: {abridge(outside)}" if outside else ""
        yield f"{abridge(named)}; looked in {shown}{why}", mend
    if unnamed:
        yield (
            f"{counted(len(unnamed), 'text-only record')} without an image: {abridge(unnamed)}",
            f"Leave text-only records out of {source.path}, or give each an `image`",
        )


def folder_of(path: str) -> str:
    return split_url(path)[0] if is_url(path) else str(Path(path).parent)
