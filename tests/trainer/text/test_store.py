import pickle
import re
import shutil
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cache_store import CacheError, open_cache
from cache_store.errors import ConfigError, StaleError
from demo.dataset import is_held_out
from tests.make_cache import caption, make_cache
from tests.trainer.conftest import GEMMA_TEMPLATE, describe, make_tokenizer
from trainer.text.chat import ChatTokenizer
from trainer.text.store import TextStore, refuse_other_text, text_folder
from trainer.text.writer import make_text, number_chunks

MAX_TOKENS = 20


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(make_tokenizer(), GEMMA_TEMPLATE, MAX_TOKENS)


@pytest.fixture(scope="module")
def folder(cache_path: Path, chat: ChatTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = open_cache(cache_path)
    folder = text_folder(cache, chat, str(tmp_path_factory.mktemp("text")))
    make_text(folder, cache, chat)
    return folder


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


def test_a_split_holds_each_sample_once_and_grows_with_its_fraction(folder):
    store = TextStore(folder)
    small, large = store.split(0.2), store.split(0.5)
    for split in (small, large):
        assert sorted([*split.train, *split.validation]) == list(range(store.meta.samples))
    assert 0 < len(small.validation) < len(large.validation)
    assert set(small.validation) < set(large.validation)
    assert len(store.split(0).validation) == 0


def test_the_same_ids_are_held_out_whatever_their_row(tmp_path, chat):
    shared, others = [f"shared-{number}" for number in range(60)], [f"other-{number}" for number in range(37)]
    held_out = []
    for name, ids in {"alone": shared, "among": [*others, *reversed(shared)]}.items():
        conversations = [describe(row) for row in range(len(ids))]
        cache = open_cache(make_cache(tmp_path / name, np.zeros((len(ids), 1, 2, 2), np.float32), ids, conversations))
        folder = text_folder(cache, chat, None)
        make_text(folder, cache, chat)
        held_out.append({ids[number] for number in TextStore(folder).split(0.3).validation} & set(shared))
        assert held_out[-1] == {sample_id for sample_id in shared if is_held_out(sample_id, 0.3)}
    assert held_out[0] == held_out[1]
    assert 5 < len(held_out[0]) < 40


def test_a_sample_without_an_assistants_words_is_in_neither_part(tmp_path, chat):
    conversations = [describe(0), [], [{"from": "human", "value": "what"}], describe(1), caption(" \n")]
    cache = open_cache(
        make_cache(
            tmp_path / "cache",
            np.random.default_rng(0).standard_normal((5, 4, 2, 2), np.float32),
            conversations=conversations,
        )
    )
    folder = text_folder(cache, chat, None)
    make_text(folder, cache, chat)
    assert folder.parent == tmp_path / "cache.text"
    split = TextStore(folder).split(0)
    assert (split.train.tolist(), split.unlabelled) == ([0, 3], 3)


def test_text_that_is_there_is_not_made_again(cache_path, chat, folder):
    before = [path.stat().st_mtime_ns for path in sorted(folder.iterdir())]
    make_text(folder, open_cache(cache_path), chat)
    assert [path.stat().st_mtime_ns for path in sorted(folder.iterdir())] == before


def test_a_failed_tokenisation_leaves_nothing(tmp_path, cache_path):
    cache = open_cache(cache_path)
    refusing = ChatTokenizer(make_tokenizer(), "{{ raise_exception('no') }}", MAX_TOKENS)
    folder = text_folder(cache, refusing, str(tmp_path))
    with pytest.raises(Exception, match="refuses it"):
        make_text(folder, cache, refusing)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps([1, 2, 3]))


def of_two_dimensions(path: Path) -> None:
    np.save(path, np.load(path).reshape(1, -1))


def turned_around(path: Path) -> None:
    np.save(path, np.load(path)[::-1].copy())


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("tokens", cut_short),
        ("is_label", pickled),
        ("offsets", of_two_dimensions),
        ("offsets", turned_around),
        ("num_labels", Path.unlink),
        ("meta", Path.unlink),
        ("meta", cut_short),
        ("id_hash", lambda path: np.save(path, np.zeros(3, np.uint64))),
    ],
)
def test_a_damaged_or_lost_file_is_named(tmp_path, folder, name, damage):
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    file = "meta.json" if name == "meta" else f"{name}.npy"
    damage(damaged / file)
    with pytest.raises(CacheError, match=rf"is damaged: {re.escape(file)}.*; delete the folder"):
        TextStore(damaged)


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


def test_a_sample_that_nobody_can_read_is_left_out_and_named(tmp_path, chat, capsys):
    odd = [{"from": "robot", "value": "beep"}]
    latents = np.zeros((4, 1, 2, 2), np.float32)
    path = make_cache(tmp_path / "cache", latents, conversations=[describe(0), odd, describe(2), describe(3)])
    cache = open_cache(path)
    folder = text_folder(cache, chat, str(tmp_path / "text"))
    make_text(folder, cache, chat)
    assert "1 samples are skipped: sample 'sample-000001': unknown role 'robot'" in capsys.readouterr().err
    assert TextStore(folder).split(0.0).train.tolist() == [0, 2, 3]


def test_nothing_but_its_own_scratch_is_cleared(tmp_path, cache_path, chat):
    precious = tmp_path / "texts/.precious.partial/thesis.tex"
    precious.parent.mkdir(parents=True)
    precious.touch()
    cache = open_cache(cache_path)
    text = text_folder(cache, chat, str(tmp_path / "texts"))
    left_over = text.with_name(f".{text.name}.1.partial")
    left_over.mkdir()
    make_text(text, cache, chat)
    assert precious.exists()
    assert not left_over.exists()


def test_a_folder_that_cannot_be_made_points_to_text_dir(tmp_path, cache_path, chat):
    (tmp_path / "file").write_text("")
    cache = open_cache(cache_path)
    with pytest.raises(ConfigError, match=r"data\.text_dir"):
        make_text(text_folder(cache, chat, str(tmp_path / "file" / "deeper")), cache, chat)


def test_chunks_cover_all_samples_and_no_chunk_spans_two_shards():
    parts = [chunk.tolist() for chunk in number_chunks([3, 0, 5_000, 1])]
    assert list(chain.from_iterable(parts)) == list(range(5_004))
    assert [part[0] for part in parts] == [0, 3, 2051, 4099, 5003]


def test_text_of_another_cache_is_refused(cache_path, folder):
    cache, meta = open_cache(cache_path), TextStore(folder).meta
    refuse_other_text(folder, meta, cache)
    with pytest.raises(StaleError, match=r"samples +\d+ +\d+\n.*delete"):
        refuse_other_text(folder, msgspec.structs.replace(meta, samples=3), cache)
