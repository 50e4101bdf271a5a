"""A sample's fields: their names in the source, and its text as turns of a conversation."""

import codecs
from collections.abc import Callable, Mapping

import msgspec

from cache_store.errors import SourceError
from precompute.images.rejected import Rejected

Conversation = list[dict[str, str]]


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


def as_caption(text: str) -> str:
    """Return the text of a caption's file without the line break at its end."""
    return text.removesuffix("\n").removesuffix("\r")


def conversation_of(*captions: str | None) -> Conversation:
    """Make a conversation: the image alone is the question to the first caption, and nothing to further ones."""
    turns: Conversation = []
    for caption in captions:
        if caption is not None:
            turns += [{"from": "human", "value": "" if turns else "<image>"}, {"from": "gpt", "value": caption}]
    return turns


def captions_of(where: str, fields: Mapping[str, object]) -> list[str]:
    """Return the captions in a sample's fields: texts, lists of texts, or absent; SourceError for others."""
    captions = list[str]()
    for name, value in fields.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str):
                captions.append(each)
            elif each is not None:
                raise SourceError(f"{where}: source.fields.captions: {name} is neither a text nor a list of texts")
    return captions
