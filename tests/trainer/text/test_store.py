import pickle
import re
import shutil
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from cache_store import CacheError, open_cache
from cache_store.errors import SourceError, StaleError
from cache_store.format.record import canonical_json, signed
from demo.dataset import is_held_out
from tests.make_cache import caption
from tests.trainer.conftest import GEMMA_TEMPLATE, describe, described_cache, make_tokenizer
from trainer.text.chat import ChatTokenizer
from trainer.text.store import TextStore, file_crc32c, read_meta, refuse_other_text, text_folder
from trainer.text.writer import make_text, number_chunks

MAX_TOKENS = 20


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(make_tokenizer(), GEMMA_TEMPLATE, MAX_TOKENS)


def tokenise(path: Path, chat: ChatTokenizer, text_dir: Path | None = None) -> Path:
    """The folder of a cache's text, which is made."""
    cache = open_cache(path)
    folder = text_folder(cache, chat, None if text_dir is None else str(text_dir))
    make_text(folder, cache, chat)
    return folder


@pytest.fixture(scope="module")
def folder(cache_path: Path, chat: ChatTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenise(cache_path, chat, tmp_path_factory.mktemp("text"))


def test_every_sample_keeps_its_own_text(cache_path, chat, folder):
    store, cache = TextStore(folder), open_cache(cache_path)
    samples = cache.samples(np.arange(len(cache))).to_pydict()
    for number, (sample_id, row) in enumerate(zip(samples["id"], samples["row"], strict=True)):
        (expected,) = chat([sample_id], [describe(row)])
        within = slice(store.offsets[number], store.offsets[number + 1])
        assert store.tokens[within].tolist() == expected.tokens.tolist()
        assert store.is_label[within].tolist() == expected.is_label.tolist()
        assert store.num_labels[number] == expected.is_label.sum()


def test_a_batch_points_at_every_label_token(folder):
    store = TextStore(folder)
    numbers = np.array([8, 1, 30])
    batch = store.collate(numbers)
    assert len(batch.target_L) == store.label_tokens(numbers)
    assert (batch.tokens_NT[batch.sample_L, batch.column_L] == batch.target_L).all()
    assert (batch.column_L > 0).all()


def test_a_split_holds_each_sample_once_and_grows(folder):
    store = TextStore(folder)
    small, large = store.split(0.2), store.split(0.5)
    for split in (small, large):
        assert sorted([*split.train, *split.validation]) == list(range(store.meta.samples))
    assert 0 < len(small.validation) < len(large.validation)
    assert set(small.validation) < set(large.validation)
    assert len(store.split(0).validation) == 0


def test_the_same_ids_are_held_out_whatever_their_row(tmp_path, chat):
    shared, others = [f"shared-{number}" for number in range(60)], [f"other-{number}" for number in range(37)]
    expected = {sample_id for sample_id in shared if is_held_out(sample_id, 0.3)}
    assert 5 < len(expected) < 40
    for name, ids in {"alone": shared, "among": [*others, *reversed(shared)]}.items():
        text = TextStore(tokenise(described_cache(tmp_path / name, len(ids), ids=ids), chat))
        assert {ids[number] for number in text.split(0.3).validation} & set(shared) == expected


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


def test_a_failed_tokenisation_leaves_nothing(tmp_path, cache_path):
    refusing = ChatTokenizer(make_tokenizer(), "{{ raise_exception('no') }}", MAX_TOKENS)
    with pytest.raises(SourceError, match="refuses it"):
        tokenise(cache_path, refusing, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


DAMAGE = {"cut short": lambda path: path.write_bytes(path.read_bytes()[:-3]), "lost": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("file", ["tokens.npy", "meta.json"])
def test_a_damaged_or_lost_file_is_named(tmp_path, folder, file, damage):
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    damage(damaged / file)
    with pytest.raises(CacheError, match=rf"is damaged: {re.escape(file)}.*; delete the folder"):
        TextStore(damaged)


FORMS = {
    "pickled": lambda path: path.write_bytes(pickle.dumps([1, 2, 3])),
    "of two dimensions": lambda path: np.save(path, np.load(path).reshape(1, -1)),
    "turned around": lambda path: np.save(path, np.load(path)[::-1].copy()),
}


@pytest.mark.parametrize("change", FORMS.values(), ids=FORMS)
def test_arrays_of_another_form_are_refused_though_vouched_for(tmp_path, folder, change):
    copy = shutil.copytree(folder, tmp_path / "copy")
    change(copy / "offsets.npy")
    meta = read_meta(copy)
    checksums = {**meta.crc32c, "offsets": file_crc32c(copy / "offsets.npy")}
    (copy / "meta.json").write_bytes(canonical_json(signed(replace(meta, crc32c=checksums))))
    with pytest.raises(CacheError, match=r"is damaged: offsets.npy.*; delete the folder"):
        TextStore(copy)


def test_any_flipped_bit_is_found(tmp_path, folder):
    random = np.random.default_rng(0)
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    for path in sorted(damaged.iterdir()):
        data = path.read_bytes()
        for place in random.integers(0, 8 * len(data), 40).tolist():
            flipped = bytearray(data)
            flipped[place // 8] ^= 1 << place % 8
            path.write_bytes(flipped)
            with pytest.raises(CacheError, match=rf"is damaged: {path.name}"):
                TextStore(damaged)
        path.write_bytes(data)


def test_chunks_cover_all_samples_and_no_chunk_spans_two_shards():
    parts = [chunk.tolist() for chunk in number_chunks([3, 0, 5_000, 1])]
    assert list(chain.from_iterable(parts)) == list(range(5_004))
    assert [part[0] for part in parts] == [0, 3, 2051, 4099, 5003]


def test_text_of_another_cache_is_refused(cache_path, folder):
    cache, meta = open_cache(cache_path), TextStore(folder).meta
    refuse_other_text(folder, meta, cache)
    with pytest.raises(StaleError, match=r"samples +\d+ +\d+\n.*delete"):
        refuse_other_text(folder, replace(meta, samples=3), cache)
