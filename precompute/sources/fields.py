"""A sample's fields: their names in the source, and its text as turns of a conversation."""

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from cache_store.errors import ConfigError, SourceError
from cache_store.format.tables import extra_problem
from precompute.images.rejected import Rejected


@dataclass(frozen=True, kw_only=True)
class FieldNames:
    """Names of a sample's fields, if they are not the usual ones."""

    image: str | None = None
    """webdataset: the extension, if a sample has several images (jpg, seg.png). parquet: the column; default: image,
    img, or a format's name. table: the column of file names; default: these, file_name, path or image_path. cache:
    another column of the Parquet files that the cache was made from. For videos: video instead of image."""
    id: str | None = None
    """parquet, table: the column; default: id, key or __key__; without one, the id is file and row, or the file."""
    caption: str | None = None
    """parquet, table: the column; default: caption, text, txt, and prompt of a table; may be absent."""
    captions: list[str] | None = None
    """If a sample has several captions: parquet: columns, webdataset: keys of the .json, each a text or a list of
    texts. A sample without any of them uses its caption."""
    conversations: str | None = None
    """parquet: the column; default: conversations; a row that has them does not use its caption."""
    extra: list[str] | None = None
    """Fields that travel in the plan, for `cache.samples` and `cache.where`: parquet, table: columns. webdataset: keys
    of the .json. llava: keys of the record. Each has texts, whole numbers, numbers, true or false, or lists of texts.
    """

    def __post_init__(self) -> None:
        if problem := extra_problem(self.extra or []):
            raise ConfigError(f"source.fields.extra: {problem}")


Conversation = list[dict[str, str]]

RecordT = TypeVar("RecordT", bound=msgspec.Struct)


def with_extra(kind: type[RecordT], names: Sequence[str]) -> type[RecordT]:
    """Return a type of record that has extra fields too, of any type; `extra_of` returns their values."""
    fields = [(f"extra_{place}", Any, msgspec.field(default=None, name=name)) for place, name in enumerate(names)]
    own = kind.__struct_encode_fields__
    fields = [each for each, name in zip(fields, names, strict=True) if name not in own]
    return cast(type[RecordT], msgspec.defstruct(kind.__name__, fields, bases=(kind,)))


def extra_of(record: msgspec.Struct, names: Sequence[str]) -> dict[str, object]:
    """Return the extra fields of a record by name; null if it lacks one."""
    held = [f"extra_{place}" if hasattr(record, f"extra_{place}") else name for place, name in enumerate(names)]
    return {name: getattr(record, attribute) for name, attribute in zip(names, held, strict=True)}


class Turn(msgspec.Struct):
    from_: str = msgspec.field(name="from")
    value: str


def read_text(where: str, read: Callable[[], bytes]) -> str:
    """Read a file's text without its byte order mark; raise SourceError if it is unreadable or not UTF-8."""
    try:
        return read().removeprefix(codecs.BOM_UTF8).decode()
    except Rejected as error:
        raise SourceError(f"{where} cannot be read: {error.detail}; mend or remove it") from None
    except UnicodeDecodeError as error:
        at = f"byte {error.start:,} is 0x{error.object[error.start]:02x}"
        raise SourceError(f"{where} is not UTF-8 text: {at}; mend or remove it") from None


def read_caption(where: str, read: Callable[[], bytes]) -> str:
    """Read the text file of a caption, without the line break at its end."""
    return read_text(where, read).removesuffix("\n").removesuffix("\r")


def conversation_of(*captions: str | None) -> Conversation:
    """Make a conversation whose question is only the image and whose answer is the caption; empty without a caption.

    Each further caption is the answer to an empty question.
    """
    turns: Conversation = []
    for caption in captions:
        if caption is not None:
            turns += [{"from": "human", "value": "" if turns else "<image>"}, {"from": "gpt", "value": caption}]
    return turns


def captions_of(where: str, fields: Mapping[str, object]) -> list[str]:
    """Return the captions in fields of a sample, each a text, a list of texts, or absent; SourceError for others."""
    captions = list[str]()
    for name, value in fields.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str):
                captions.append(each)
            elif each is not None:
                raise SourceError(f"{where}: source.fields.captions: {name} is neither a text nor a list of texts")
    return captions
