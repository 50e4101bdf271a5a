"""The refusal of a source whose samples lack their images or texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cache_store.errors import SourceError
from cache_store.messages import abridge
from cache_store.storage.store import is_url, split_url
from precompute.images.rejected import CONTINUE
from precompute.sources.config import SOURCES, SourceConfig
from precompute.sources.media import Media

Bare = tuple[str, str]
"""Id and uri of a sample that has no image or no text."""


def refuse_missing(bare: Sequence[Bare], rows: int, source: SourceConfig, media: Media, allowed: float) -> NoReturn:
    """Raise SourceError: more than the fraction `allowed` of all samples lack their image or text."""
    kind, path = SOURCES[source.kind], source.images or source.path
    if source.text:
        lacking, names, advice = f"a {source.text}", abridge([name for name, _ in bare]), kind.add_texts
    elif not any(uri for _, uri in bare):
        lacking, names = f"their {media.name}", abridge([name for name, _ in bare])
        advice = f"Leave records of text only out of {source.path}"
    else:
        lacking, names = f"their {media.name}", abridge([uri or name for name, uri in bare])
        if not kind.images_are and not source.images:
            path = split_url(path)[0] if is_url(path) else str(Path(path).parent)
        where = path if is_url(path) else Path(path).expanduser().resolve()  # "." would read as a full stop
        names += f"; looked in {where}"
        advice = f"Mend {where}" if kind.images_are else "Set source.images to where they are, or mend the list"
    raise SourceError(
        f"{len(bare)} of {rows} samples without {lacking}: {names}. That is more than run.max_reject_fraction "
        f"{allowed:g} allows; nothing was encoded. {advice}; {CONTINUE}"
    )
