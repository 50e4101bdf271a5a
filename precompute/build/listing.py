"""List a source as tables: the samples of one part of the plan after the other, each part in memory.

Samples keep the source's order: that of a list's records, of the rows of files, and of sorted names in a folder.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pyarrow.compute as pc

from cache_store.errors import SourceError
from cache_store.format.plan import caption_of
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
from precompute.sources.tables import make_table

NO_IDS = pa.array([], pa.string())

NOTHING: Mapping[int, int] = MappingProxyType({})

Bare = tuple[str, str]
"""Id and uri of a sample that has no image or no text."""


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
        lacking = f"a {source.text}" if source.text else f"their {self._config.media.name}"
        texts = abridge([name for name, _ in bare]), SOURCES[source.kind].add_texts
        reasons, advice = zip(*([texts] if source.text else why_missing(bare, source)), strict=True)
        raise SourceError(
            f"{len(bare)} of {self.rows} samples without {lacking}: {'; '.join(reasons)}. That is more than "
            f"run.max_reject_fraction {allowed:g} allows; nothing was encoded. {'. '.join(advice)}; {CONTINUE}"
        )

    def say(self) -> None:
        """Tell of the source's other files, of masks and of missing captions."""
        if self._note:
            log_info(printable(self._note))
        for warning in self._seen.warnings(SOURCES[self._config.source.kind].add_texts) if self._seen else ():
            log_warning(printable(warning))


def why_missing(missing: Sequence[Bare], source: SourceConfig) -> Iterator[tuple[str, str]]:
    """Yield each reason why images are missing, and what to do about it."""
    unnamed, named = [name for name, uri in missing if not uri], [uri for _, uri in missing if uri]
    if named:
        is_list = not SOURCES[source.kind].images_are
        folder = split_url(source.path)[0] if is_url(source.path) else str(Path(source.path).parent)
        where = source.images or (folder if is_list else source.path)
        shown = where if is_url(where) else Path(where).expanduser().resolve()  # "." would read as a full stop
        below = None if is_url(where) or not is_list else folder_below(Path(where), named[0])
        mend = f"Set source.images to {below}, where they are" if below else "Set source.images, or mend it"
        outside = [name for name in named if is_unsafe(name)]
        why = f"; not a name inside it: {abridge(outside)}" if outside else ""
        yield f"{abridge(named)}; looked in {shown}{why}", mend if is_list else f"Mend {shown}"
    if unnamed:
        yield (
            f"{counted(len(unnamed), 'text-only record')} without an image: {abridge(unnamed)}",
            f"Leave text-only records out of {source.path}, or give each an `image`",
        )
