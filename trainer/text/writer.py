"""Tokenise a cache's text in chunks of samples, in bounded memory, and publish it as a whole."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from cache_store import CacheError, JoinedCache
from cache_store.errors import ConfigError, SourceError
from cache_store.format.record import FORMAT_VERSION, canonical_json, sign
from cache_store.log import log_info
from cache_store.messages import counted
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.claim import claim_folder
from cache_store.storage.publish import name_in_errors, publish_folder
from trainer.text.chat import ChatTokenizer, has_moved_image
from trainer.text.store import ARRAYS, META_FILE, TextMeta, file_crc32c

SHOWN_PROBLEMS = 3
"""Number of skipped samples named in one message."""

CHUNK_SAMPLES = 2_048
"""Most samples tokenised together, which bounds memory."""


def make_text(folder: Path, cache: JoinedCache, chat: ChatTokenizer) -> None:
    """Tokenise the text of all samples into `folder`, unless it exists."""
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
            samples=len(cache),
            tokens=num_tokens,
            largest_token=largest,
            begins_with_bos=chat.begins_with_bos,
            crc32c={name: file_crc32c(scratch / f"{name}.npy") for name in ARRAYS},
            sha256="",
        )
        (scratch / META_FILE).write_bytes(canonical_json(sign(meta)))


def write_arrays(folder: Path, cache: JoinedCache, chat: ChatTokenizer) -> tuple[int, int]:
    """Write every array of the store; return the number of tokens and the largest token id."""
    largest, problems, moved = 0, list[str](), 0
    with ExitStack() as stack:
        files = {name: stack.enter_context(NpyWriter(folder / f"{name}.npy", ARRAYS[name])) for name in ARRAYS}
        files["offsets"].append([0])
        progress = stack.enter_context(ProgressBar("tokenise", len(cache), "sample"))
        for numbers in number_chunks(len(cache)):
            samples = cache.samples(numbers, columns=["id", "conversations"]).to_pydict()
            texts = chat(samples["id"], samples["conversations"])
            moved += sum(map(has_moved_image, samples["conversations"]))
            problems += [text.problem for text in texts if text.problem]
            tokens = np.concatenate([text.tokens for text in texts])
            largest = max(largest, int(tokens.max(initial=0)))
            files["offsets"].append(files["tokens"].length + np.cumsum([len(text.tokens) for text in texts]))
            files["tokens"].append(tokens)
            files["is_label"].append(np.concatenate([text.is_label for text in texts]))
            files["num_labels"].append([text.is_label.sum() for text in texts])
            files["id_hash"].append([id_hash(sample_id) for sample_id in samples["id"]])
            progress.update(len(numbers))
    report_skipped(problems, len(cache))
    if moved:
        log_info(
            f"{counted(moved, 'sample')} with an image marker after other words, or several: an image's tokens come "
            "once, before the conversation"
        )
    return files["tokens"].length, largest


def report_skipped(problems: Sequence[str], samples: int) -> None:
    """Log how many samples were skipped, and why the first few were; SourceError if all were."""
    if len(problems) == samples:
        raise SourceError(f"{problems[0]}; the same for every sample")
    if problems:
        log_info(f"{counted(len(problems), 'sample')} skipped: {'; '.join(problems[:SHOWN_PROBLEMS])}")


def number_chunks(samples: int) -> Iterator[np.ndarray]:
    """Yield all sample numbers in order, in chunks of CHUNK_SAMPLES."""
    for start in range(0, samples, CHUNK_SAMPLES):
        yield np.arange(start, min(start + CHUNK_SAMPLES, samples))


def id_hash(sample_id: str) -> int:
    """Return the first 8 bytes of SHA-256 over the id: uniform, and equal in every cache that holds the sample."""
    return int.from_bytes(hashlib.sha256(sample_id.encode()).digest()[:8], "little")


class NpyWriter:
    """A one-dimensional .npy file that grows; numpy leaves room in the header for its final length."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path, self.dtype, self.length = path, np.dtype(dtype), 0
        self._stream = path.open("w+b")
        self._header_bytes = self._write_header()

    def append(self, values: Sequence[int] | np.ndarray) -> None:
        array = np.asarray(values, self.dtype)
        with name_in_errors(self.path):
            self._stream.write(array.tobytes())
        self.length += len(array)

    def _write_header(self) -> int:
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.length,)}
        self._stream.seek(0)
        np.lib.format.write_array_header_1_0(self._stream, header)
        return self._stream.tell()

    def __enter__(self) -> "NpyWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with name_in_errors(self.path), self._stream:
            if kind is None:
                grown = self._write_header()
                assert grown == self._header_bytes, "numpy reserves room for 21 digits of length"
