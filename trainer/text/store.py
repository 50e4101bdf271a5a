"""Text tokenised once, beside the cache: flat memory-mapped arrays, under a key that hashes all that decides them.

    CACHE.text/KEY/tokens      int32 [all tokens]
                   is_label    bool [all tokens]
                   ends        int64 [samples]; sample s holds tokens [ends[s - 1], ends[s])
                   num_labels  int32 [samples]
                   id_hash     uint64 [samples]; decides the split
                   meta.json   the key and every array's crc32c, signed; written last

The folder appears whole or not at all.
"""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cache_store import CacheError, JoinedCache
from cache_store.errors import ConfigError, SourceError
from cache_store.format.codec import crc32c
from cache_store.format.record import FORMAT_VERSION, Record, canonical_json, parse_signed, sign
from cache_store.log import log_info
from cache_store.messages import counted
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.claim import claim_folder
from cache_store.storage.publish import name_in_errors, publish_folder
from trainer.text.chat import ChatTokenizer, has_moved_image

TEXT_VERSION = 6
"""Increase it when the same inputs would give different arrays."""

ARRAYS = {"tokens": "<i4", "is_label": "|b1", "ends": "<i8", "num_labels": "<i4", "id_hash": "<u8"}
META_FILE = "meta.json"
READ_BYTES = 64 * 2**20
CHUNK_SAMPLES, SHOWN_PROBLEMS = 2_048, 3
"""Most samples tokenised together, and most skipped ones named in one message."""

PLANNED, LENGTH_UNIT = 4, 8
"""How many lengths texts are padded to if each new one costs a compilation, and the lengths' unit."""


class TextMeta(Record, frozen=True):
    format_version: int
    key: str
    largest_token: int
    crc32c: dict[str, int]
    """Checksum of each array's file."""
    sha256: str


@dataclass(frozen=True)
class TextBatch:
    """Texts padded to one length, and the place and value of each label token."""

    # Axes: N samples, T text tokens, L label tokens of the batch.

    tokens_NT: np.ndarray
    sample_L: np.ndarray
    """Row in tokens_NT."""
    column_L: np.ndarray
    target_L: np.ndarray
    """Token id."""


@dataclass(frozen=True)
class Split:
    """Sample numbers by use, each ascending."""

    train: np.ndarray
    validation: np.ndarray
    unlabelled: int
    """Number of samples without a label within the length limit, which are in neither array."""

    def among(self, numbers: np.ndarray) -> "Split":
        train, validation = (np.intersect1d(each, numbers) for each in (self.train, self.validation))
        return Split(train=train, validation=validation, unlabelled=self.unlabelled)


class TextStore:
    """Tokens and labels by sample number."""

    def __init__(self, folder: Path) -> None:
        self.meta = read_sound(folder)
        arrays = (np.memmap(folder / name, dtype, mode="r") for name, dtype in ARRAYS.items())
        self.tokens, self.is_label, self.ends, self.num_labels, self.id_hash = arrays

    def label_tokens(self, numbers: np.ndarray) -> int:
        return int(self.num_labels[numbers].sum())

    def text_tokens(self, numbers: np.ndarray) -> int:
        return int(self.lengths(numbers).sum())

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        lengths: np.ndarray = self.ends[numbers] - self.starts(numbers)
        return lengths

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        starts: np.ndarray = np.where(numbers > 0, self.ends[numbers - 1], 0)
        return starts

    def planned_lengths(self) -> tuple[int, ...]:
        longest = int(np.diff(self.ends, prepend=0).max(initial=1))
        steps = (-(-longest * part // (PLANNED * LENGTH_UNIT)) * LENGTH_UNIT for part in range(1, PLANNED + 1))
        return tuple(sorted(set(steps)))

    def split(self, val_fraction: float) -> Split:
        labelled, validation = np.asarray(self.num_labels) > 0, held_out(np.asarray(self.id_hash), val_fraction)
        return Split(
            train=np.flatnonzero(labelled & ~validation),
            validation=np.flatnonzero(labelled & validation),
            unlabelled=int((~labelled).sum()),
        )

    def collate(self, numbers: np.ndarray, planned: Sequence[int] = ()) -> TextBatch:
        """Pad texts on the right with token 0, to the longest or the next planned length; no label comes after it."""
        starts, ends = self.starts(numbers), self.ends[numbers]
        longest = int((ends - starts).max())
        shape = (len(numbers), next((length for length in planned if length >= longest), longest))
        tokens_NT, is_label_NT = np.zeros(shape, np.int64), np.zeros(shape, bool)
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            tokens_NT[row, : end - start] = self.tokens[start:end]
            is_label_NT[row, : end - start] = self.is_label[start:end]
        sample_L, column_L = np.nonzero(is_label_NT)
        return TextBatch(tokens_NT, sample_L, column_L, tokens_NT[sample_L, column_L])


def held_out(id_hashes: np.ndarray, val_fraction: float) -> np.ndarray:
    """Return which samples are for validation: ids that hash into the first `val_fraction` of the range."""
    if val_fraction == 1:
        return np.ones_like(id_hashes, bool)
    is_held_out: np.ndarray = id_hashes < np.uint64(int(val_fraction * 2**64))
    return is_held_out


def read_sound(folder: Path) -> TextMeta:
    """Read the folder's meta file; CacheError unless it belongs there and every array is as it was written."""
    try:
        meta = parse_signed(TextMeta, (folder / META_FILE).read_bytes(), META_FILE)
        changed = [name for name in ARRAYS if file_crc32c(folder / name) != meta.crc32c.get(name)]
    except (OSError, CacheError) as error:
        problem = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    else:
        if not changed and meta.key == folder.name:
            return meta
        problem = f"{changed[0]} does not match its crc32c" if changed else f"{META_FILE} has the key {meta.key}"
    raise CacheError(f"{folder} is damaged: {problem}; delete the folder and run the same command again") from None


def file_crc32c(path: Path) -> int:
    checksum = 0
    with path.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            checksum = crc32c(block, checksum)
    return checksum


def text_folder(cache: JoinedCache, chat: ChatTokenizer, text_dir: str | None) -> Path:
    """Return the folder of this text, by default beside the first cache; its name is the text's key."""
    parts = (TEXT_VERSION, chat.digest, cache.identity, cache.texts_digest)
    key = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]
    if text_dir is not None:
        return Path(text_dir).expanduser() / key
    root = cache.first.root
    assert isinstance(root, Path), "text_dir is needed for a cache at a URL"
    return root.with_name(f"{root.name}.text") / key


def make_text(folder: Path, cache: JoinedCache, chat: ChatTokenizer) -> None:
    if folder.exists():
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(claim_folder(folder.parent, wait=True))
        except OSError as error:
            raise ConfigError(f"cannot make {folder.parent} ({error.strerror}); name another data.text_dir") from None
        if not folder.exists():  # another run may have made it while this one waited
            publish_text(folder, cache, chat)


def publish_text(folder: Path, cache: JoinedCache, chat: ChatTokenizer) -> None:
    with publish_folder(folder) as scratch:
        num_tokens, largest = write_arrays(scratch, cache, chat)
        if not num_tokens:
            raise CacheError(
                f"{cache.first.root} has no text to learn: none of its {len(cache):,} samples has words of the "
                f"assistant in data.max_text_tokens {chat.max_tokens}; raise it if texts are longer, and check that "
                "the chat template writes the assistant's words. Text comes from the conversations of a LLaVA source, "
                "or from name.txt beside name.jpg in a folder"
            )
        meta = TextMeta(
            format_version=FORMAT_VERSION,
            key=folder.name,
            largest_token=largest,
            crc32c={name: file_crc32c(scratch / name) for name in ARRAYS},
            sha256="",
        )
        (scratch / META_FILE).write_bytes(canonical_json(sign(meta)))


def write_arrays(folder: Path, cache: JoinedCache, chat: ChatTokenizer) -> tuple[int, int]:
    """Write every array of the store; return the number of tokens and the largest token id."""
    num_tokens, largest, problems, moved = 0, 0, list[str](), 0
    with ProgressBar("tokenise", len(cache), "sample") as progress:
        for start in range(0, len(cache), CHUNK_SAMPLES):
            numbers = np.arange(start, min(start + CHUNK_SAMPLES, len(cache)))
            samples = cache.samples(numbers, columns=["id", "conversations"]).to_pydict()
            texts = chat(samples["id"], samples["conversations"])
            moved += sum(map(has_moved_image, samples["conversations"]))
            problems += [text.problem for text in texts if text.problem]
            tokens = np.concatenate([text.tokens for text in texts])
            arrays: dict[str, Any] = {
                "tokens": tokens,
                "is_label": np.concatenate([text.is_label for text in texts]),
                "ends": num_tokens + np.cumsum([len(text.tokens) for text in texts]),
                "num_labels": [text.is_label.sum() for text in texts],
                "id_hash": [id_hash(sample_id) for sample_id in samples["id"]],
            }
            for name, dtype in ARRAYS.items():
                with name_in_errors(folder / name), (folder / name).open("ab") as stream:
                    stream.write(np.asarray(arrays[name], dtype).tobytes())
            num_tokens, largest = num_tokens + len(tokens), max(largest, int(tokens.max(initial=0)))
            progress.update(len(numbers))
    if len(problems) == len(cache):
        raise SourceError(f"{problems[0]}; the same for every sample")
    if problems:
        log_info(f"{counted(len(problems), 'sample')} skipped: {'; '.join(problems[:SHOWN_PROBLEMS])}")
    if moved:
        log_info(
            f"{counted(moved, 'sample')} with an image marker after other words, or several: an image's tokens come "
            "once, before the conversation"
        )
    return num_tokens, largest


def id_hash(sample_id: str) -> int:
    """Return the first 8 bytes of SHA-256 over the id: uniform, and equal in every cache that holds the sample."""
    return int.from_bytes(hashlib.sha256(sample_id.encode()).digest()[:8], "little")
