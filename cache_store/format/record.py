"""How a record rests on disk: canonical JSON (RFC 8785), signed by its own digest, parsed strictly.

Equal records are equal bytes, so a digest over a record is a digest over its meaning.
msgspec parses: an unknown field, a missing field or a wrong type is an error with the field's path, never a guess.
"""

import hashlib
import re
from functools import cached_property
from typing import ClassVar, TypeVar

import msgspec
import rfc8785

from cache_store.errors import CacheError, NewerFormatError

FORMAT_VERSION = 1

NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no JSON; a ValidationError, of JSON that is something else, is one of them."""

MISFIT = re.compile(
    r"(?:Object (?P<kind>missing required|contains unknown) field `(?P<name>.*?)`|(?P<expected>.*?))"
    r"(?: - at `\$\.?(?P<path>.*)`)?",
    re.DOTALL,
)
"""What a ValidationError says, and where."""

LACKS = "it lacks a field"

WRITTEN_OTHERWISE = re.compile(rb"\\|e[-+]?\d+[,\]}]|-0[,\]}]")
"""What msgspec and RFC 8785 may write in two ways: escapes, numbers with exponents, and zeros below zero."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A record that is JSON on disk."""

    max_bytes: ClassVar[int] = 16 * 2**20
    """Of its file: more than any that can be written has. A spec of `MAX_SIDE` features has two numbers for each, of
    24 bytes."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical form; of a content that was read, of its bytes in the file."""
        return self.canonical_digest()

    def canonical_digest(self) -> str:
        return hashlib.sha256(canonical_json(self)).hexdigest()

    @property
    def is_canonical(self) -> bool:
        """Whether the bytes that `digest` is of, where it is that of a file's, are the canonical form.

        msgspec writes nearly all records so, but for whole numbers, in a fifth of the time that rfc8785 takes.
        """
        data = msgspec.json.encode(self, order="sorted")
        for mark in (b",", b"]", b"}"):
            data = data.replace(b".0" + mark, mark)
        if self.digest == hashlib.sha256(data).hexdigest() and data.isascii() and not WRITTEN_OTHERWISE.search(data):
            return True
        return self.digest == self.canonical_digest()


RecordT = TypeVar("RecordT", bound=Record)


class ContentBytes(msgspec.Struct):
    """The `content` of a record that has one, as it lies in the file."""

    content: msgspec.Raw = msgspec.Raw(b"")


class Versioned(msgspec.Struct):
    """Any record, as far as programs of every version agree on it."""

    format_version: int


def canonical_json(value: object) -> bytes:
    """The one form in which records rest on disk and enter digests."""
    try:
        return rfc8785.dumps(msgspec.to_builtins(value))
    except rfc8785.CanonicalizationError as error:
        raise CacheError(f"a value that no record can hold: {error}") from None


def parse_record(record_class: type[RecordT], data: bytes, where: str) -> RecordT:
    """Parse strictly; `where` names the file in the error."""
    try:
        return msgspec.json.decode(data, type=record_class, strict=True)
    except msgspec.ValidationError as error:
        raise CacheError(f"{where} does not hold what it should: {misfit(error)}") from None
    except NO_JSON:
        raise no_json(data, where) from None


def misfit(error: msgspec.DecodeError) -> str:
    """What msgspec found wrong in a record, the field by its whole name first; as it is of what is no JSON."""
    said = str(error)
    found = MISFIT.fullmatch(said if said.isprintable() else repr(said)[1:-1])  # names and values are another's text
    assert found, error
    path, name = found["path"] or "", found["name"]
    if name is None:
        expected = str(found["expected"]).replace("Expected `", "expected `", 1)
        return f"{path}: {expected}" if path else expected
    kind = LACKS if found["kind"] == "missing required" else "it has an unknown field"
    whole = f"{path}.{name}".lstrip(".")
    return f"{kind}, {whole}"


def no_json(data: bytes, where: str) -> CacheError:
    return CacheError(f"{where} is {'damaged: it is no JSON' if data else 'empty'}")


def signed(record: RecordT) -> RecordT:
    """The record with its `sha256` filled in over everything else."""
    return msgspec.structs.replace(record, sha256=msgspec.structs.replace(record, sha256="").digest)


def parse_signed(record_class: type[RecordT], data: bytes, where: str) -> RecordT:
    """Parse a signed record whose bytes are exactly what was written: no bit may differ.

    A digest does not occur in what it is over, so the record's own is taken out of the bytes as they are.
    """
    refuse_other_version(data, where)
    record = parse_record(record_class, data, where)
    digest: str = getattr(record, "sha256")  # noqa: B009 (of signed records alone)
    if hashlib.sha256(data.replace(b'"sha256":"%s"' % digest.encode(), b'"sha256":""')).hexdigest() != digest:
        raise CacheError(f"{where} does not match its own sha256: it was edited or damaged")
    if content := getattr(record, "content", None):
        # Writing it again only to know its digest took ten times as long as reading it.
        vars(content)["digest"] = hashlib.sha256(msgspec.json.decode(data, type=ContentBytes).content).hexdigest()
    return record


def refuse_other_version(data: bytes, where: str) -> None:
    """Before its fields are looked at: another version may have others. Silent where there is no version at all."""
    try:
        version = msgspec.json.decode(data, type=Versioned).format_version
    except NO_JSON:
        return  # the record's own parser says what is wrong
    refuse_version(version, where)


def refuse_version(version: object, where: str) -> None:
    if version != FORMAT_VERSION:
        raise NewerFormatError(f"{where} has format version {version!r}; this program reads version {FORMAT_VERSION}")
