"""What is said of an image, as turns of a conversation."""

import codecs
from collections.abc import Callable

import msgspec

from cache_store.errors import SourceError
from cache_store.format.plan import answers_of
from precompute.images.rejected import Rejected

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
