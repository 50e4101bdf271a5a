"""A cache's text, tokenised once into a folder beside it."""

import pickle
import re
import shutil
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from cache_store import CacheError, open_cache
from cache_store.format.record import canonical_json, signed
from demo.dataset import is_held_out
from tests.make_cache import caption
from tests.trainer.conftest import GEMMA_TEMPLATE, describe, described_cache, make_tokenizer
from trainer.text.chat import ChatTokenizer
from trainer.text.store import TextStore, file_crc32c, read_meta, text_folder
from trainer.text.writer import make_text, number_chunks


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(make_tokenizer(), GEMMA_TEMPLATE, 20)


def tokenise(path: Path, chat: ChatTokenizer, text_dir: Path | None = None) -> Path:
    """The folder of a cache's text, which is made."""
    cache = open_cache(path)
    folder = text_folder(cache, chat, None if text_dir is None else str(text_dir))
    make_text(folder, cache, chat)
    return folder


@pytest.fixture(scope="module")
def folder(cache_path: Path, chat: ChatTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenise(cache_path, chat, tmp_path_factory.mktemp("text"))


def test_every_sample_keeps_its_own_text_also_in_a_batch(cache_path, chat, folder):
    store, cache = TextStore(folder), open_cache(cache_path)
    samples = cache.samples(np.arange(len(cache))).to_pydict()
    for number, (sample_id, row) in enumerate(zip(samples["id"], samples["row"], strict=True)):
        (expected,) = chat([sample_id], [describe(row)])
        within = slice(store.offsets[number], store.offsets[number + 1])
        assert store.tokens[within].tolist() == expected.tokens.tolist()
        assert store.is_label[within].tolist() == expected.is_label.tolist()
        assert store.num_labels[number] == expected.is_label.sum()
        batch = store.collate(np.array([8, number]))
        ours = batch.sample_L == 1
        assert batch.tokens_NT[1, : len(expected.tokens)].tolist() == expected.tokens.tolist()
        assert batch.column_L[ours].tolist() == np.flatnonzero(expected.is_label).tolist()
        assert batch.target_L[ours].tolist() == expected.tokens[expected.is_label].tolist()
        assert len(batch.target_L) == store.label_tokens(np.array([8, number]))


def test_chunks_cover_all_samples_and_no_chunk_spans_two_shards():
    parts = [chunk.tolist() for chunk in number_chunks([3, 0, 5_000, 1])]
    assert list(chain.from_iterable(parts)) == list(range(5_004))
    assert [part[0] for part in parts] == [0, 3, 2051, 4099, 5003]


def test_the_same_ids_are_held_out_whatever_their_row(tmp_path, chat):
    shared, others = [f"shared-{number}" for number in range(60)], [f"other-{number}" for number in range(37)]
    for name, ids in {"alone": shared, "among": [*others, *reversed(shared)]}.items():
        text = TextStore(tokenise(described_cache(tmp_path / name, len(ids), ids=ids), chat))
        for fraction in (0, 0.3, 0.5):
            split = text.split(fraction)
            assert {ids[number] for number in split.validation} == {each for each in ids if is_held_out(each, fraction)}
            assert sorted([*split.train, *split.validation]) == list(range(len(ids)))


def test_a_sample_that_teaches_no_words_is_in_neither_part(tmp_path, chat, capsys):
    human, robot = ([{"from": who, "value": "what"}] for who in ("human", "robot"))
    conversations = [describe(0), [], human, describe(1), caption(" \n"), robot]
    folder = tokenise(described_cache(tmp_path / "cache", 6, conversations=conversations), chat)
    assert folder.parent == tmp_path / "cache.text"
    split = TextStore(folder).split(0)
    assert (split.train.tolist(), split.unlabelled) == ([0, 3], 4)
    assert "1 samples are skipped: sample 'sample-000005': unknown role 'robot'" in capsys.readouterr().err


def test_text_is_made_once_and_clears_its_own_scratch_alone(cache_path, chat, tmp_path):
    text = text_folder(open_cache(cache_path), chat, str(tmp_path))
    precious, left_over = tmp_path / ".precious.partial", tmp_path / f".{text.name}.1.partial"
    precious.mkdir()
    left_over.mkdir()
    stamps = []
    for _ in range(2):
        assert tokenise(cache_path, chat, tmp_path) == text
        stamps.append([path.stat().st_mtime_ns for path in sorted(text.iterdir())])
    assert stamps[0] == stamps[1]
    assert {path.name for path in tmp_path.iterdir()} == {text.name, precious.name, ".lock"}


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return shutil.copytree(folder, tmp_path / folder.name)


def refuse(folder: Path, problem: str) -> None:
    with pytest.raises(CacheError, match=rf"is damaged: {problem}.*; delete the folder"):
        TextStore(folder)


def test_any_flipped_bit_and_a_lost_or_short_file_is_named(damaged):
    random = np.random.default_rng(0)
    for path in sorted(damaged.iterdir()):
        data, name = path.read_bytes(), re.escape(path.name)
        for place in random.integers(0, 8 * len(data), 40).tolist():
            flipped = bytearray(data)
            flipped[place // 8] ^= 1 << place % 8
            path.write_bytes(flipped)
            refuse(damaged, name)
        path.write_bytes(data[:-3])
        refuse(damaged, name)
        path.unlink()
        refuse(damaged, name)
        path.write_bytes(data)
    refuse(damaged.rename(damaged.with_name("another")), f"meta.json is of {damaged.name}")


FORMS = {
    "pickled": lambda path: path.write_bytes(pickle.dumps([1, 2, 3])),
    "of two dimensions": lambda path: np.save(path, np.load(path).reshape(1, -1)),
    "turned around": lambda path: np.save(path, np.load(path)[::-1].copy()),
}


@pytest.mark.parametrize("change", FORMS.values(), ids=FORMS)
def test_arrays_of_another_form_are_refused_though_vouched_for(damaged, change):
    change(damaged / "offsets.npy")
    meta = read_meta(damaged)
    checksums = {**meta.crc32c, "offsets": file_crc32c(damaged / "offsets.npy")}
    (damaged / "meta.json").write_bytes(canonical_json(signed(replace(meta, crc32c=checksums))))
    refuse(damaged, "offsets.npy")
