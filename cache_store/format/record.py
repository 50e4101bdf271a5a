"""Records on disk: canonical JSON (RFC 8785), signed by its own digest, parsed strictly.

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

JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for bytes that are not JSON; the subclass ValidationError is for JSON of a wrong shape."""

MISMATCH = re.compile(
    r"(?:Object (?P<kind>missing required|contains unknown) field `(?P<name>.*?)`|(?P<expected>.*?))"
    r"(?: - at `\$\.?(?P<path>.*)`)?",
    re.DOTALL,
)
"""The message of a ValidationError, split into problem and path."""

MISSING_FIELD = "it lacks a field"


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A record that is JSON on disk."""

    max_bytes: ClassVar[int] = 16 * 2**20
    """Largest file that is read; no valid record is larger. A spec has two numbers of 24 bytes for each of up to
    `MAX_SIDE` features.
    """

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical form; for a `content` read by `parse_signed`, of its bytes in the file."""
        return hashlib.sha256(canonical_json(self)).hexdigest()


RecordT = TypeVar("RecordT", bound=Record)


class ContentBytes(msgspec.Struct):
    """The bytes of a record's `content` as they are in the file."""

    content: msgspec.Raw = msgspec.Raw(b"")


class Versioned(msgspec.Struct):
    """The part of a record that every format version has."""

    format_version: int


def canonical_json(value: object) -> bytes:
    """Encode a value in the form in which records are stored and hashed; CacheError if JSON cannot hold it."""
    try:
        return rfc8785.dumps(msgspec.to_builtins(value))
    except rfc8785.CanonicalizationError as error:
        raise CacheError(f"a record cannot hold this value: {error}") from None


def parse_record(record_class: type[RecordT], data: bytes, where: str) -> RecordT:
    """Parse a record strictly; raise CacheError, naming the file `where`, if it does not fit."""
    try:
        return msgspec.json.decode(data, type=record_class, strict=True)
    except msgspec.ValidationError as error:
        raise CacheError(f"{where} is not a valid record: {describe_mismatch(error)}") from None
    except JSON_ERRORS:
        raise not_json_error(data, where) from None


def describe_mismatch(error: msgspec.DecodeError) -> str:
    """Describe what msgspec rejected, with the field's full path; keep a message about broken JSON as it is."""
    text = str(error)
    found = MISMATCH.fullmatch(text if text.isprintable() else repr(text)[1:-1])  # names and values come from the file
    assert found, error
    path, name = found["path"] or "", found["name"]
    if name is None:
        expected = str(found["expected"]).replace("Expected `", "expected `", 1)
        return f"{path}: {expected}" if path else expected
    kind = MISSING_FIELD if found["kind"] == "missing required" else "it has an unknown field"
    whole = f"{path}.{name}".lstrip(".")
    return f"{kind}, {whole}"


def not_json_error(data: bytes, where: str) -> CacheError:
    return CacheError(f"{where} is {'damaged: it is not JSON' if data else 'empty'}")


def sign(record: RecordT) -> RecordT:
    """Return the record with `sha256` computed over all its other fields."""
    return msgspec.structs.replace(record, sha256=msgspec.structs.replace(record, sha256="").digest)


def parse_signed(record_class: type[RecordT], data: bytes, where: str) -> RecordT:
    """Parse a signed record; CacheError if any bit of its bytes differs from what was written.

    The digest covers the record with an empty `sha256`, so its value is removed from the bytes before they are hashed.
    """
    refuse_other_version(data, where)
    record = parse_record(record_class, data, where)
    digest: str = getattr(record, "sha256")  # noqa: B009 (of signed records alone)
    if hashlib.sha256(data.replace(b'"sha256":"%s"' % digest.encode(), b'"sha256":""')).hexdigest() != digest:
        raise CacheError(f"{where} does not match its own sha256: it was edited or damaged")
    if content := getattr(record, "content", None):
        # Hash the bytes as read: encoding the content again takes ten times as long as reading it.
        vars(content)["digest"] = hashlib.sha256(msgspec.json.decode(data, type=ContentBytes).content).hexdigest()
    return record


def refuse_other_version(data: bytes, where: str) -> None:
    """Raise NewerFormatError before fields are parsed; data without a version is left to the record's parser."""
    try:
        version = msgspec.json.decode(data, type=Versioned).format_version
    except JSON_ERRORS:
        return
    refuse_version(version, where)


def refuse_version(version: object, where: str) -> None:
    if version != FORMAT_VERSION:
        raise NewerFormatError(f"{where} has format version {version!r}; this program reads version {FORMAT_VERSION}")
