"""Tokenise a cache's text in chunks of samples, in bounded memory, and publish it as a whole."""

import hashlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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
