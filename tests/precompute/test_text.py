"""A text encoder's cache goes the whole way: build, kill, verify, repair, convert, audit, look, join, train."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import precompute.rerun.steps as build_module
from cache_store import open_cache, open_joined
from cache_store.cache.metadata import read_commit
from cache_store.cli import main as cache_store
from cache_store.errors import ConfigError
from cache_store.format.tables import SAMPLES_OF_TEXTS
from cache_store.verify.verify import verify
from precompute.cli import main
from precompute.encode_images import encode_images
from precompute.encoders.config import EncoderConfig
from precompute.encoders.registry import load_encoder
from tests.precompute.acts import rewrite
from tests.precompute.conftest import SAMPLES, Project, flip, timeless_files
from tests.precompute.encoders.test_texts import encoded
from tests.precompute.encoders.text_models import FEATURES, save_text_encoder
from trainer import LatentStream

TOKENS = 16
SPEECHLESS = (3, 12)
"""Places of the samples without a caption."""
SPEAKING = [number for number in range(SAMPLES) if number not in SPEECHLESS]
CAPTIONS = [f"Picture {number}{', a long one' * (number == 5)}." for number in SPEAKING]
OF_TEXTS: dict[str, Any] = {"source__text": "caption", "encoder__max_tokens": TOKENS, "image": {}}


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_encoder("T5EncoderModel", tmp_path_factory.mktemp("t5"))


def silence(project: Project) -> None:
    """Two samples have no answer, one a long one; of images, two are broken, which no text encoder minds."""
    path = project.source / "chat.json"
    records = json.loads(path.read_text())
    for number, record in enumerate(records):
        if number in SPEECHLESS:
            record["conversations"].pop()
        else:
            record["conversations"][1]["value"] = CAPTIONS[SPEAKING.index(number)]
            record["conversations"] += [{"from": "human", "value": "Sure?"}, {"from": "gpt", "value": "Yes."}]
    path.write_text(json.dumps(records))


@pytest.fixture
def texts(project: Project, t5: Path) -> Project:
    """With a cache of its captions."""
    silence(project)
    project.vae, project.settings = t5, OF_TEXTS
    project.build()
    return project


def test_a_cache_of_texts_is_what_the_encoder_makes_of_them(project, t5):
    silence(project)
    project.vae, project.settings, texts = t5, OF_TEXTS, project
    said = project.build()
    assert "22 planned = 20 cached + 2 rejected (2 no text)" in said
    assert "encoded 22 texts in 3 shards" in said
    assert "cut 1 text longer than encoder.max_tokens" in said
    cache = open_cache(texts.cache)
    encoder: Any = load_encoder(EncoderConfig(model=str(t5), compute_dtype="float32", max_tokens=TOKENS), "signed")
    expected = encoded(encoder, CAPTIONS).numpy()
    order = np.random.default_rng(0).permutation(len(SPEAKING))
    np.testing.assert_allclose(cache.read(order), expected[order], rtol=0, atol=2e-3)
    counts = [len(each.ids) for each in encoder.tokens(CAPTIONS)]
    mask = cache.mask(order)
    assert mask.sum(1).tolist() == [min(counts[each], TOKENS) for each in order]
    assert mask[:, 0].all()
    assert not (np.diff(mask.astype(int)) > 0).any()


def test_samples_tables_of_texts_count_tokens(texts):
    table, record = open_cache(texts.cache).shards.table(0, SAMPLES_OF_TEXTS.names), read_commit(texts.cache, 0)
    assert table.schema == SAMPLES_OF_TEXTS
    assert table["reason"].to_pylist()[3] == "no text: the sample has no caption"
    counts = [each and len(each) + 1 for each in first_texts()]  # letters, and an end
    assert table["tokens"].to_pylist() == counts
    assert (record.content.cut_texts, record.content.unreadable_exif) == (1, 0)
    said = texts.run(cache_store, "info", texts.cache)
    for each in (
        f"text            caption, {TOKENS} tokens, padding seen",
        "T5EncoderModel, native, float32, batches of 3",
        f"float16 [token {TOKENS}, feature {FEATURES}], codec none",
        "longer texts    1 cached text, cut",
    ):
        assert each in said


def first_texts() -> list[str | None]:
    """Of the first shard's rows."""
    return [CAPTIONS[SPEAKING.index(row)] if row in SPEAKING else None for row in range(8)]


def test_a_damaged_cache_of_texts_is_repaired_and_converted_bit_by_bit(texts):
    tars, back = texts.folder / "tars", texts.folder / "back"
    with texts.same_in_the_end():
        flip(texts.cache / "latents/c/1/0/0")
        assert any(finding.row in range(8, 16) for finding in verify(texts.cache, "deep").findings)
        for name in ("latents/c/1/0/0", "samples/000001.parquet", "commits/000001.json"):
            texts.lose(name)
            texts.repair("--report", texts.report())
        texts.lose("zarr.json", "latents/zarr.json")
        texts.build("--check-sources")
    texts.run(cache_store, "convert", texts.cache, tars, "--format", "webdataset")
    texts.run(cache_store, "convert", tars, back, "--format", "zarr")
    texts.run(cache_store, "copy", back, texts.folder / "copy")
    assert timeless_files(back) == timeless_files(texts.folder / "copy") == texts.files()
    assert not verify(tars, "deep").findings


def test_one_and_two_workers_and_ranks_write_the_same_bytes_of_texts(texts):
    for name, options in {"two": {"run__workers": 2}, "ranks": {}}.items():
        if name == "two":
            texts.build(name=name, **options)
            continue
        config = texts.config(name)
        texts.run(main, "plan", "--config", config)
        for rank in (1, 0):
            texts.run(main, "build", "--config", config, "--rank", rank, "--world-size", 2)
        texts.run(main, "seal", "--config", config)
    assert timeless_files(texts.folder / "two") == timeless_files(texts.folder / "ranks") == texts.files()


def test_a_changed_caption_is_refused_and_an_image_that_changed_is_not(texts):
    texts.has(sample_001=b"another image")
    silence(texts)
    assert "nothing to encode" in texts.build()
    rewrite(texts.source / "chat.json", CAPTIONS[7], "Another picture.")
    with texts.untouched():
        said = texts.build(code=1)
    assert "was planned from another sample list: 1 with another image name or text (sample-008)" in said


OTHER_RECIPES: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"encoder__max_tokens": 12}, "array.text.max_tokens"),
    "template": ({"encoder__template": "an image of {}"}, "array.text.template"),
    "padding": ({"encoder__padding": "zero"}, "array.text.padding"),
    "layer": ({"encoder__layer": -2}, "array.encoder.layer"),
}


@pytest.mark.parametrize("name", OTHER_RECIPES)
def test_another_text_recipe_is_refused_by_name(texts, name):
    options, field = OTHER_RECIPES[name]
    with texts.untouched():
        assert field in texts.build(code=1, **options)


def test_another_tokenizer_is_refused_by_name(texts, t5, tmp_path):
    other = save_text_encoder("T5EncoderModel", tmp_path / "other")
    rewrite(other / "tokenizer/tokenizer.json", '"</s>"', '"<eos>"')
    rewrite(other / "tokenizer/tokenizer_config.json", '"</s>"', '"<eos>"')
    with texts.untouched():
        said = texts.build(code=1, encoder__model=str(other))
    assert "array.encoder.tokenizer_sha256" in said
    assert "weights_sha256" not in said


@pytest.mark.parametrize(
    ("dtype", "allowed"), [("float32", "1e-05, at most by 3e-05"), ("bfloat16", "0.09, at most by")]
)
def test_a_device_that_reads_texts_otherwise_commits_nothing(project, t5, monkeypatch, dtype, allowed):
    def load(config, pixel_range):
        encoder = load_encoder(config, pixel_range)
        encoder._model.model.encoder.block[1].layer[0].SelfAttention.v.weight *= -1  # type: ignore[attr-defined]
        return encoder

    project.vae, project.settings = t5, {**OF_TEXTS, "encoder__compute_dtype": dtype}
    monkeypatch.setattr(build_module, "load_encoder", load)
    said = project.build(code=1)
    assert f"{dtype} on a cpu device may differ by {allowed}" in said
    assert not [*project.cache.glob("commits/*"), *project.cache.rglob("*.partial")]
    monkeypatch.undo()
    project.build()


def test_an_audit_and_a_gallery_of_texts_show_what_was_encoded(texts):
    said = texts.run(main, "audit", texts.cache, "--samples", "1000")
    assert "all 20 cached samples were compared: 0 differ" in said
    assert "equal bits  20 of 20" in said
    page = texts.folder / "page.html"
    said = texts.run(cache_store, "gallery", texts.cache, "-o", page)
    assert "without pictures of samples: samples are texts, not images; the page shows texts" in said
    shown = page.read_text()
    for each in (CAPTIONS[4], "no text: the sample has no caption", f"{TOKENS} tokens", "tokens, cut", "1 texts cut"):
        assert each in shown
    assert "source image" not in shown
    assert "Yes." not in shown, "an answer that was not encoded"
    assert not [*texts.folder.glob("*.png")]
    (line,) = texts.run(main, "gallery", texts.cache, "-o", page, "--decode", code=2).splitlines()
    assert line.endswith("is of class T5EncoderModel, which has no decoder")
    with pytest.raises(ConfigError, match="the cache was made from texts"):
        encode_images(open_cache(texts.cache), [])


def test_an_estimate_of_texts_measures_them(texts):
    said = texts.run(main, "estimate", "--config", texts.config("new"), "--seconds", "1")
    assert "texts/s" in said
    assert "images" not in said


def test_texts_join_latents_by_row_and_are_streamed_with_their_mask(built, t5):
    built.vae = t5
    source = {"kind": "cache", "path": str(built.cache), "text": "caption"}
    built.build(name="text", **{**OF_TEXTS, "source": source})
    joined = open_joined({"world": built.cache, "text": built.folder / "text"})
    (batch, *_) = LatentStream(joined, batch_size=4, seed=0)
    assert batch["latents"]["world"].shape == (4, 16, 4, 5)
    assert batch["latents"]["text"].shape == (4, TOKENS, FEATURES)
    rows = joined.rows(batch["numbers"].numpy())
    text = joined.caches["text"]
    np.testing.assert_array_equal(batch["mask"]["text"], text.mask(rows))  # no text is rejected
    assert batch["mask"]["text"].dtype == torch.bool
    (alone, *_) = LatentStream(text, batch_size=4, seed=0)
    np.testing.assert_array_equal(alone["mask"], text.mask(alone["numbers"].numpy()))


def test_pooled_vectors_are_a_cache_of_their_own(project, tmp_path):
    project.vae = save_text_encoder("CLIPTextModelWithProjection", tmp_path / "clip", "_2")
    pooled = {"encoder__subfolder": "text_encoder_2", "encoder__output": "pooled", "encoder__padding": "seen"}
    project.build(**{**OF_TEXTS, **pooled})
    cache = open_cache(project.cache)
    assert cache.read(np.arange(3)).shape == (3, 8)
    said = project.run(cache_store, "info", project.cache)
    assert "float16 [feature 8]" in said
    assert "CLIPTextModelWithProjection, native, float32, pooled vector, batches of 3" in said
    assert "all 22 cached samples were compared: 0 differ" in project.run(main, "audit", project.cache)
    with pytest.raises(ConfigError, match=r"holds \[feature 8\], which has no mask of tokens"):
        cache.mask(np.arange(3))
    assert "mask" not in next(iter(LatentStream(cache, batch_size=4)))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no text": (
        {"source__text": None},
        "encoder.max_tokens is for a text encoder, which reads texts; set source.t",
    ),
    "no length": ({"encoder__max_tokens": None}, "source.text: caption is for a text encoder; set encoder.max_tokens"),
    "image": ({"image": {"height": 64}}, "image.height means nothing to a text encoder; leave image: out"),
    "posterior": ({"encoder__posterior": "moments"}, "encoder.posterior: moments means nothing to a T5EncoderModel"),
    "fold": ({"encoder__fold": False}, "encoder.fold: false means nothing to a T5EncoderModel; leave it out"),
    "template": ({"encoder__template": "no place"}, "encoder.template must have one {}, where the text goes"),
    "pooled": ({"encoder__output": "pooled"}, "encoder.output: a T5EncoderModel has no pooled vector of a text"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_of_a_text_encoder_is_one_line(project, t5, name):
    project.vae, (options, message) = t5, WRONG[name]
    settings = {**OF_TEXTS, **options}
    (line,) = project.build(code=2, **{key: value for key, value in settings.items() if value is not None}).splitlines()
    assert message in line


def test_a_source_without_captions_is_refused_before_anything_is_encoded(project, t5):
    project.vae, folder = t5, project.folder / "tree"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"")
    said = project.build(code=1, **{**OF_TEXTS, "source": {"kind": "folder", "path": str(folder), "text": "caption"}})
    assert "1 of 1 samples of" in said
    assert "without a caption: a.png" in said
    assert "Put each caption beside its image, as name.txt" in said


def test_an_images_encoder_is_told_of_no_texts(project):
    (line,) = project.build(code=2, source__text="caption", encoder__max_tokens=8, image={}).splitlines()
    assert line.endswith("holds no model: it has none of text_encoder/config.json, config.json")
    (line,) = project.build(code=2, **{**OF_TEXTS, "encoder__subfolder": "vae"}).splitlines()
    assert "is of class AutoencoderKLWan, which is not a known text encoder" in line
