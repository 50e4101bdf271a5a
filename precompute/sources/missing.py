"""The refusal of a source whose samples lack their images or texts."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from cache_store.errors import SourceError
from cache_store.messages import abridge, counted
from cache_store.storage.store import is_url, split_url
from precompute.images.rejected import CONTINUE
from precompute.sources.config import SOURCES, SourceConfig
from precompute.sources.image_store import folder_below, is_unsafe
from precompute.sources.media import Media

Bare = tuple[str, str]
"""Id and uri of a sample that has no image or no text."""


def refuse_missing(bare: Sequence[Bare], rows: int, source: SourceConfig, media: Media, allowed: float) -> NoReturn:
    """Raise SourceError: more than the fraction `allowed` of all samples lack their image or text."""
    lacking = f"a {source.text}" if source.text else f"their {media.name}"
    texts = abridge([name for name, _ in bare]), SOURCES[source.kind].add_texts
    reasons, advice = zip(*([texts] if source.text else why_missing(bare, source)), strict=True)
    raise SourceError(
        f"{len(bare)} of {rows} samples without {lacking}: {'; '.join(reasons)}. That is more than "
        f"run.max_reject_fraction {allowed:g} allows; nothing was encoded. {'. '.join(advice)}; {CONTINUE}"
    )


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
