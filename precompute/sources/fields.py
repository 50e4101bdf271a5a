"""A sample's fields: their names in the source, and its text as turns of a conversation."""

import codecs
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from cache_store.errors import SourceError
from cache_store.format.plan import answers_of
from precompute.images.rejected import Rejected


@dataclass(frozen=True, kw_only=True)
class FieldNames:
    """Which part of a sample is what, where the usual names do not fit."""

    image: str | None = None
    """webdataset: the extension of the image, where a sample has several (jpg, seg.png). parquet: its column, image or
    img by default, or a format's name."""
    id: str | None = None
    """parquet: the column, id, key or __key__ by default; without one, file and row."""
    caption: str | None = None
    """parquet: the column, caption, text or txt by default; may be absent."""
    conversations: str | None = None
    """parquet: the column, conversations by default; where a row has them, its caption is not used."""


Conversation = list[dict[str, str]]


class Turn(msgspec.Struct):
    from_: str = msgspec.field(name="from")
    value: str


def text_of(where: str, read: Callable[[], bytes]) -> str:
    """The text of a file, without the mark of some editors; SourceError where there is none, or it is not UTF-8."""
    try:
        return read().removeprefix(codecs.BOM_UTF8).decode()
    except Rejected as error:
        raise SourceError(f"{where} cannot be read: {error.detail}; mend or remove it") from None
    except UnicodeDecodeError as error:
        at = f"byte {error.start:,} is 0x{error.object[error.start]:02x}"
        raise SourceError(f"{where} is not UTF-8 text: {at}; mend or remove it") from None


def answer_of(conversation: Conversation | None) -> str:
    """The first answer of a conversation, as a caption is; empty where nobody answers."""
    return next(iter(answers_of(conversation)), "").strip()


def captioned(caption: str) -> Conversation:
    """A caption as the answer to the image alone; no turns where it is blank."""
    if not (caption := caption.strip()):
        return []
    return [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": caption}]
