"""A text encoder's cache goes the whole way: build, verify, repair, copy, audit, look, join, train."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from cache_store import open_cache, open_joined
from cache_store.cache.metadata import read_commit
from cache_store.cli import main as cache_store
from cache_store.errors import CacheError, ConfigError, StaleError
from cache_store.format.layout import NULL_TEXT_FILE
from cache_store.format.plan import shuffled_tags
from cache_store.format.tables import SAMPLES_SCHEMA
from cache_store.verify.verify import verify
from precompute.cli import main
from precompute.encoders.text_presets import PRESETS
from tests.precompute.acts import rewrite
from tests.precompute.conftest import SAMPLES, Project, timeless_files
from tests.precompute.encoders.loading import load
from tests.precompute.encoders.test_text_encoder import encoded
from tests.precompute.encoders.text_models import FEATURES, save_text_encoder
from trainer import LatentStream

TOKENS = 16
SPEECHLESS = (3, 12)
"""Numbers of the samples without a caption."""
SPEAKING = [number for number in range(SAMPLES) if number not in SPEECHLESS]
CAPTIONS = {number: f"Picture {number}{', a long one' * (number == 5)}." for number in SPEAKING} | {7: ""}
SETTINGS: dict[str, Any] = {"source__text": "caption", "encoder__max_tokens": TOKENS, "image": {}}


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_encoder("T5EncoderModel", tmp_path_factory.mktemp("t5"))


def write_captions(project: Project) -> None:
    """Leave two samples without an answer, and give one a long and one an empty one."""

    def change(number: int, record: dict[str, Any]) -> None:
        if number in SPEECHLESS:
            record["conversations"].pop()
        else:
            record["conversations"][1]["value"] = CAPTIONS[number]
            record["conversations"] += [{"from": "human", "value": "Sure?"}, {"from": "gpt", "value": "Yes."}]

    project.edit(change)


@pytest.fixture
def captioned(project: Project, t5: Path) -> Project:
    write_captions(project)
    project.vae, project.settings = t5, SETTINGS
    return project


@pytest.fixture
def texts(captioned: Project) -> Project:
    captioned.build()
    return captioned


def test_a_cache_of_texts_holds_the_encoders_samples_their_tokens_and_the_null_prompt(captioned, t5):
    """The null prompt is what an empty caption gives: row 7, the sixth after a rejected one."""
    said = captioned.build()
    assert all(named in said for named in ("20 cached + 2 rejected", "22 texts", "cut 1 text"))
    cache, encoder, captions = open_cache(captioned.cache), load(t5, max_tokens=TOKENS), [*CAPTIONS.values()]
    expected = encoded(encoder, captions).numpy()
    order = np.random.default_rng(0).permutation(len(SPEAKING))
    np.testing.assert_allclose(cache.read(order), expected[order], rtol=0, atol=2e-3)
    counts, mask = [len(each.ids) for each in encoder.texts.tokens(captions)], cache.mask(order)
    assert mask.sum(1).tolist() == [min(counts[each], TOKENS) for each in order]
    assert mask[:, 0].all()
    assert not (np.diff(mask.astype(int)) > 0).any()
    null, (of_empty,) = cache.null_text(), cache.read(np.array([6]))
    np.testing.assert_allclose(null, encoded(encoder, [""])[0].numpy(), rtol=0, atol=2e-3)
    np.testing.assert_allclose(null, of_empty, rtol=0, atol=2e-3)
    np.testing.assert_array_equal(cache.null_mask(), cache.mask(np.array([6]))[0])
    table, record = cache.shards.table(0, SAMPLES_SCHEMA.names), read_commit(captioned.cache, 0)
    assert table.schema == SAMPLES_SCHEMA
    assert str(table["reason"].to_pylist()[3]).startswith("no text")
    letters_and_end = [len(CAPTIONS[row]) + 1 if row in CAPTIONS else None for row in range(8)]
    assert table["tokens"].to_pylist() == letters_and_end
    assert (record.content.cut_texts, record.content.remarks) == (1, {})


def test_a_damaged_null_prompt_is_named_and_repaired(texts):
    with texts.same_in_the_end():
        texts.place.flip(NULL_TEXT_FILE)
        with pytest.raises(CacheError, match=NULL_TEXT_FILE):
            open_cache(texts.cache).null_text()
        (finding,) = verify(texts.cache, "full").findings
        assert (finding.shard, finding.file) == (0, NULL_TEXT_FILE)
        texts.repair("--report", texts.report())
        texts.lose(NULL_TEXT_FILE)
        assert [finding.file for finding in verify(texts.cache, "quick").findings] == [NULL_TEXT_FILE]
        texts.repair()


def test_of_changed_captions_only_their_shards_are_encoded_again(texts, t5):
    """A changed image is none of it."""
    texts.has(sample_001=b"another image")
    write_captions(texts)
    texts.build()
    rewrite(texts.source / "chat.json", CAPTIONS[8], "Another picture.")
    kept = texts.place.marks()
    assert "precompute captions" in texts.build()
    said = texts.run(main, "captions", texts.cache)
    assert all(named in said for named in ("1 sample (sample-008)", "encodes 1 shard again"))
    with pytest.raises(StaleError, match="not sealed"):
        open_cache(texts.cache)
    assert {finding.shard for finding in verify(texts.cache, "full").findings} == {None, 1}
    assert "8 texts in 1 shard" in texts.build()
    assert not verify(texts.cache, "deep").findings
    cache = open_cache(texts.cache)
    number = cache.samples(np.arange(len(cache)), ["id"])["id"].to_pylist().index("sample-008")
    expected = encoded(load(t5, max_tokens=TOKENS), ["Another picture."]).numpy()
    np.testing.assert_allclose(cache.read(np.array([number])), expected, rtol=0, atol=2e-3)
    written = {name for name, mark in texts.place.marks().items() if kept.get(name) != mark}
    shard_1 = {"commits/000001.json", "samples/000001.parquet", f"latents/{TOKENS}x1/c/1/0/0"}
    assert {name for name in written if name.startswith(("commits", "samples", "latents"))} == shard_1


def test_another_text_recipe_or_tokenizer_is_refused_by_name(texts, tmp_path):
    other = save_text_encoder("T5EncoderModel", tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        rewrite(other / "tokenizer" / name, '"</s>"', '"<eos>"')
    with texts.untouched():
        assert "array.text.template" in texts.build(code=1, encoder__template="an image of {}")
        assert "array.encoder.tokenizer_sha256" in texts.build(code=1, encoder__model=str(other))


def test_a_gallery_of_texts_shows_the_captions(texts):
    page = texts.folder / "page.html"
    texts.run(cache_store, "gallery", texts.cache, "-o", page)
    shown = page.read_text()
    for each in (CAPTIONS[5], "no text: the sample has no caption", f"{TOKENS} tokens", "tokens, cut", "1 texts cut"):
        assert each in shown
    assert "Yes." not in shown, "only the first answer is encoded"


def test_caches_of_several_captions_are_views_of_the_texts(texts, t5):
    """Samples without an answer are rejected in each; a stream shows each text with its own mask, and resumes."""
    texts.build(name="second", source__caption=2)
    caches = [open_cache(texts.cache), open_cache(texts.folder / "second")]
    assert "caption 2" in texts.run(cache_store, "info", texts.folder / "second")
    assert [cache.spec.array.text.caption for cache in caches if cache.spec.array.text] == [1, 2]
    assert caches[0].spec.samples_digest == caches[1].spec.samples_digest
    encoder, numbers = load(t5, max_tokens=TOKENS), np.arange(len(SPEAKING))
    chosen = caches[0].captions(numbers, seed=3)
    assert caches[0].captions(numbers[::-1], seed=3) == chosen[::-1]
    expected = [encoded(encoder, [*CAPTIONS.values()]).numpy(), encoded(encoder, ["Yes."] * len(SPEAKING)).numpy()]
    for cache, samples in zip(caches, expected, strict=True):
        np.testing.assert_allclose(cache.read(numbers), samples, rtol=0, atol=2e-3)
    stream = LatentStream([texts.cache, texts.folder / "second"], batch_size=4, seed=0, epochs=2)
    whole, masks, shown = [*stream], [cache.mask(numbers) for cache in caches], set[tuple[int, int]]()
    for batch in whole:
        for number, latent, mask in zip(batch["numbers"].tolist(), batch["latents"], batch["mask"], strict=True):
            (view,) = (each for each in (0, 1) if np.array_equal(caches[each].read(np.array([number]))[0], latent))
            np.testing.assert_array_equal(mask, masks[view][number])
            shown.add((number, view))
    assert len(shown) == 2 * len(SPEAKING)
    stream.load_state_dict({"cursor": whole[2]["cursor"]})
    for one, other in zip(whole[3:], stream, strict=True):
        assert torch.equal(one["latents"], other["latents"])
        assert torch.equal(one["mask"], other["mask"])


def test_shuffled_tags_are_another_view_with_an_order_of_each_seed_and_sample(texts, t5):
    tags = "mine, a, b,c , d"
    for number in SPEAKING[:3]:
        rewrite(texts.source / "chat.json", f'"Picture {number}."', f'"{tags}"')
    paths = [texts.folder / f"seed-{seed}" for seed in (0, 1)]
    for seed, path in enumerate(paths):
        texts.build(name=path.name, source__shuffle_tags=seed, source__keep_tags=1)
        assert f"shuffled by seed {seed}" in texts.run(cache_store, "info", path)
    caches, encoder = [*map(open_cache, paths)], load(t5, max_tokens=TOKENS)
    ids = [f"sample-{number:03d}" for number in SPEAKING[:3]]
    shuffled = [[shuffled_tags(tags, 1, f"{seed}\n{name}") for name in ids] for seed in (0, 1)]
    assert len({*shuffled[0], *shuffled[1]}) > 3
    for cache, expected in zip(caches, shuffled, strict=True):
        np.testing.assert_allclose(cache.read(np.arange(3)), encoded(encoder, expected).numpy(), rtol=0, atol=2e-3)
        assert cache.captions(np.arange(3)) == [tags] * 3


def test_shuffled_tags_are_as_the_page_of_the_format_says():
    def digest(place: int) -> bytes:
        return hashlib.sha256(f"7\ncat.jpg\n{place}".encode()).digest()

    tags = ["one", "two", "", "four", "two"]
    expected = ["one", *(tags[place] for place in sorted(range(1, 5), key=digest))]
    assert shuffled_tags("one,two, ,\tfour , two", 1, "7\ncat.jpg") == ", ".join(expected)
    assert shuffled_tags("one", 3, "7\ncat.jpg") == "one"


def test_pooled_vectors_are_a_cache_without_a_mask(project, tmp_path):
    project.vae = save_text_encoder("CLIPTextModelWithProjection", tmp_path / "clip", "_2")
    pooled = {"encoder__subfolder": "text_encoder_2", "encoder__output": "pooled", "encoder__padding": "seen"}
    project.build(**SETTINGS, **pooled)
    cache = open_cache(project.cache)
    assert cache.read(np.arange(3)).shape == (3, 8)
    assert "[feature 8]" in project.run(cache_store, "info", project.cache)
    assert "equal bits  22 of 22" in project.run(main, "audit", project.cache)
    assert cache.null_text().shape == (8,)
    for mask in (lambda: cache.mask(np.arange(3)), cache.null_mask):
        with pytest.raises(ConfigError, match=r"\[feature 8\]"):
            mask()
    assert "mask" not in next(iter(LatentStream(cache, batch_size=4)))


# One command builds a cache for each text encoder of a model, over the samples of a cache of images.

SMALL = ("--compute_dtype", "float32", "--batch_size", 4, "--device", "cpu", "--store.samples_per_shard", 8)


@pytest.fixture(scope="session")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text encoders of a small FLUX.1."""
    folder = save_text_encoder("CLIPTextModel", tmp_path_factory.mktemp("flux"))
    return save_text_encoder("T5EncoderModel", folder, "_2")


def of_flux(project: Project, flux: Path, *options: object, code: int = 0) -> str:
    place = ["--source", project.cache, "--cache", project.folder / "text", "--of", "FLUX.1-dev", "--model", flux]
    return project.run(main, "texts", *place, *SMALL, *options, code=code)


def test_one_command_builds_the_texts_of_a_model_and_resumes(built, flux):
    """Run again, it restores the same bytes: of a cache that has lost a shard, and of one that is gone."""
    said, out = of_flux(built, flux), built.folder / "text"
    assert said.count(f"sealed {out}/") == 2
    joined = open_joined({"world": built.cache, "t5": out / "t5", "pooled": out / "pooled"})
    (batch, *_) = LatentStream(joined, batch_size=3, seed=0)
    shapes = {"world": (3, 16, 4, 5), "t5": (3, 512, FEATURES), "pooled": (3, FEATURES)}
    assert {name: each.shape for name, each in batch["latents"].items()} == shapes
    mask = joined.caches["t5"].mask(joined.rows(batch["numbers"].numpy()))
    np.testing.assert_array_equal(batch["mask"].pop("t5"), mask)
    assert not batch["mask"]
    assert joined.null_text().keys() == {"t5", "pooled"}
    assert joined.null_mask().keys() == {"t5"}
    array = open_cache(out / "t5").spec.array
    assert (array.encoder.compute_dtype, array.codec) == ("float32", "lz4")
    before = {name: timeless_files(out / name) for name in PRESETS["FLUX.1-dev"]}
    next((out / "t5" / "commits").glob("*1.json")).unlink()
    (out / "t5" / "seal.json").unlink()
    shutil.rmtree(out / "pooled")
    assert "1 shard" in of_flux(built, flux)
    assert {name: timeless_files(out / name) for name in before} == before
    assert of_flux(built, flux).count("nothing to encode") == 2
    assert "--cache NEW" in of_flux(built, flux, "--batch_size", 3, code=1)
    assert not any(verify(out / name, "full").findings for name in before)


def test_configs_are_those_of_ordinary_builds_for_ranks(built, flux, monkeypatch):
    with monkeypatch.context() as rank:
        rank.setenv("RANK", "1")
        rank.setenv("WORLD_SIZE", "2")
        assert "--configs" in of_flux(built, flux, code=2)
    said, folder = of_flux(built, flux, "--configs", built.folder / "configs"), built.folder / "configs"
    assert not (built.folder / "text").exists()
    for name in PRESETS["FLUX.1-dev"]:
        config = folder / f"{name}.yaml"
        assert f"precompute build --config {config}" in said
        for line in ("plan", "build --rank 1 --world-size 2", "build --rank 0 --world-size 2", "seal"):
            built.run(main, *line.split(), "--config", config)
    assert of_flux(built, flux).count("nothing to encode") == 2


def test_new_samples_are_added_to_all_texts(project, flux):
    project.has(range(16))
    project.build()
    of_flux(project, flux)
    project.has()
    project.build("--extend")
    assert "precompute texts" in of_flux(project, flux, code=1)
    of_flux(project, flux, "--extend")
    assert [open_cache(project.folder / "text" / name).spec.rows for name in ("t5", "pooled")] == [SAMPLES] * 2


def test_encoders_of_ones_own_choice_are_a_mapping_in_the_config(built, flux):
    common = {"model": str(flux), "device": "cpu", "compute_dtype": "float32"}
    chosen = {"a": {**common, "subfolder": "text_encoder_2", "max_tokens": 9}, "b": {**common, "max_tokens": 20}}
    config = built.folder / "texts.yaml"
    config.write_text(yaml.safe_dump({"source": str(built.cache), "cache": str(built.folder / "own"), "texts": chosen}))
    built.run(main, "texts", "--config", config)
    assert [open_cache(built.folder / "own" / name).spec.arrays[0].shape[0] for name in chosen] == [9, 20]
