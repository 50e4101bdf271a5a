"""The gallery: one page that needs nothing else, shows what it says, and trusts no text."""

import base64
import io
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow.parquet as pq
import pytest
from msgspec import structs
from PIL import Image

from cache_store.cache.metadata import read_commit, write_build
from cache_store.cache.reader import Cache, open_cache
from cache_store.cache.writer import Outcome
from cache_store.cli import main
from cache_store.errors import CacheError
from cache_store.format.schema import samples_file
from cache_store.gallery import draw, plots, sheets, source_images
from cache_store.gallery.config import GalleryConfig
from cache_store.gallery.draw import draw_rejects, draw_survey, random_numbers
from cache_store.gallery.exhibits import Exhibit
from cache_store.gallery.gallery import make_gallery
from cache_store.gallery.page import layout
from cache_store.gallery.pictures import channel_strip, error_map, preview, psnr, strip_columns
from cache_store.gallery.sheets import contact_sheet
from cache_store.gallery.unusual import Unusual, most_unusual, survey_latents
from cache_store.verify.verify import verify
from tests.cache_store.conftest import flip
from tests.make_cache import caption, make_cache

ROWS, REJECTED, OUTLIER = 30, (3, 9, 29), 17
HOSTILE_ID = '<script>alert("id")</script>'
HOSTILE_CAPTION = '"><img src=http://example.org/x onerror=alert(1)> {{ 7 * 7 }} $\\frac{ 🟥'
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def latents() -> np.ndarray:
    """float32 [30, 4, 6, 5]; one row is like no other."""
    values = np.random.default_rng(5).standard_normal((ROWS, 4, 6, 5)).astype(np.float32)
    values[OUTLIER] = 6 + 0.01 * values[OUTLIER]
    return values


def write_cache(path: Path, store_format: str = "zarr") -> Path:
    ids = [f"sample-{row:06d}" for row in range(ROWS)]
    ids[4] = HOSTILE_ID
    conversations = [caption(f"this is {name}") for name in ids]
    conversations[5] = caption(HOSTILE_CAPTION)
    return make_cache(path, latents(), ids, conversations, rejected=REJECTED, store_format=store_format)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cache(tmp_path_factory.mktemp("gallery") / "cache")


class Elements(HTMLParser):
    """Every tag with its attributes, and all text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def words(self) -> str:
        return " ".join(self.text.split())

    @property
    def titles(self) -> set[str | None]:
        return {attributes.get("title") for _, attributes in self.tags}

    def alt(self, start: str) -> list[str]:
        """Sources of the images whose alternative text starts so."""
        return [a["src"] or "" for tag, a in self.tags if tag == "img" and (a.get("alt") or "").startswith(start)]


def page_of(cache: Path, folder: Path, **options: object) -> Elements:
    config = GalleryConfig(output=str(folder / "gallery.html"), **{"rows": 6, **options})  # type: ignore[arg-type]
    make_gallery(cache, config)
    return Elements(config.page.read_text())


@pytest.fixture(scope="module")
def page(cache: Path) -> Elements:
    """The page of `cache` with the options of `page_of`; it lies beside the cache."""
    return page_of(cache, cache.parent)


def give_sources(cache: Path, folder: Path, **images: bytes) -> None:
    """Let the cache remember a folder of images; `images` are its files by sample (with _ for -)."""
    folder.mkdir()
    for name, data in images.items():
        (folder / f"{name.replace('_', '-')}.png").write_bytes(data)
    source, image = {"kind": "folder", "path": str(folder)}, {"height": 48, "width": 40}
    write_build(cache, {"source": source, "encoder": {"model": "org/name"}, "image": image, "store": {}})


def png_bytes(colour: tuple[int, int, int]) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (64, 48), colour).save(stream, "PNG")
    return stream.getvalue()


def test_the_page_refers_to_nothing_outside_itself(cache, page):
    assert {"script", "link", "iframe", "object", "base"}.isdisjoint(tag for tag, _ in page.tags)
    for tag, attributes in page.tags:
        assert all(attributes.get(name, "data:").startswith("data:") for name in ("src", "srcset")), tag
        assert attributes.get("href", "#").startswith("#")
    (style,) = re.findall(r"<style>(.*)</style>", (cache.parent / "gallery.html").read_text(), re.DOTALL)
    assert not re.search(r"url\(|@import", style)
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; img-src data:;")


def test_every_image_on_the_page_can_be_decoded(page):
    uris = [a.get("src") or a.get("srcset") for tag, a in page.tags if tag in ("img", "source")]
    assert len(uris) > 2 * 2 * 6
    for uri in uris:
        head, _, data = uri.partition(",")
        decoded = base64.b64decode(data, validate=True)
        if "svg" in head:
            assert ElementTree.fromstring(decoded).tag.endswith("svg")
        else:
            Image.open(io.BytesIO(decoded)).load()


def test_hostile_ids_and_captions_stay_text(page_with_sources):
    assert HOSTILE_ID in page_with_sources.text
    assert HOSTILE_CAPTION in page_with_sources.text
    assert not [name for _, attributes in page_with_sources.tags for name in attributes if name.startswith("on")]


def most_unusual_of(cache: Cache, rows: int) -> list[Unusual]:
    return most_unusual(survey_latents(cache, draw_survey(cache, 240, seed=0)), rows)


def test_the_outlier_leads_the_unusual_rows(cache, page):
    first = most_unusual_of(open_cache(cache), 3)[0]
    assert open_cache(cache).samples(np.array([first.number]))["row"].to_pylist() == [OUTLIER]
    assert re.fullmatch(r"(mean|spread) of channel [0-3] at [+−]\d\.\d σ", first.why)
    assert f"distance {first.distance:.1f}, {first.why}" in page.text


def test_few_samples_are_not_all_equally_far(tmp_path):
    """Under their own unshrunk covariance they would be."""
    few = make_cache(tmp_path / "cache", latents()[OUTLIER - 2 : OUTLIER + 2])
    first, second, *_ = most_unusual_of(open_cache(few), 4)
    assert first.number == 2
    assert first.distance > 1.1 * second.distance


def test_rejected_rows_tell_id_size_caption_and_reason(tmp_path, monkeypatch):
    def rejected_for_size(row: int, is_rejected: bool) -> Outcome:
        return Outcome(content_sha256="0" * 64, width=9_000, height=70, reason="too large" if is_rejected else None)

    monkeypatch.setattr("tests.make_cache.outcome", rejected_for_size)
    page = page_of(write_cache(tmp_path / "cache"), tmp_path)
    assert "3 of 30 planned rows have no latent" in page.words
    _, *rejects = (tmp_path / "gallery.html").read_text().split('<article class="card reject">')
    for row, html in zip(REJECTED, rejects, strict=True):
        sample, text = f"sample-{row:06d}", Elements(html).text
        for told in ("too large", sample, f"{sample}.png", "70 high × 9,000 wide", f"this is {sample}"):
            assert told in text


@pytest.fixture(scope="module")
def page_with_sources(tmp_path_factory: pytest.TempPathFactory) -> Elements:
    """Of a cache whose folder of images holds another picture for row 0, no picture for row 1, and one for row 3."""
    folder = tmp_path_factory.mktemp("sources")
    cache = write_cache(folder / "cache")
    red = png_bytes((255, 0, 0))
    give_sources(cache, folder / "images", sample_000000=red, sample_000001=b"no image", sample_000003=red)
    return page_of(cache, folder, rows=27)


def test_source_images_are_shown_or_said_missing_or_changed(page_with_sources):
    (uri, *_) = page_with_sources.alt("source image of row 0")
    thumbnail = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
    assert thumbnail.size == (40, 48), "the recipe's size: as the encoder saw it"
    assert np.abs(np.asarray(thumbnail).astype(int) - (255, 0, 0)).max() < 8
    assert "source (changed)" in page_with_sources.text
    assert "this file has changed since it was encoded" in page_with_sources.titles
    assert page_with_sources.alt("source image of row 1") == []
    assert "cannot decode: is " in page_with_sources.text
    assert "missing: sample-000002.png: No such file or directory" in page_with_sources.text
    assert len(page_with_sources.alt("source image of row 3")) == 1, "rejected, and readable now"
    assert "this file could not be read when the cache was built" in page_with_sources.titles


def test_sizes_are_height_by_width_throughout(page):
    """The recipe of 6 x 5 cells; images of 48 x 64."""
    for told in ("48 × 40image, height × width", "48 x 40, squash", "48 high × 64 wide"):
        assert told in page.text
    assert "40 × 48" not in page.text


def test_flat_recipes_have_cards_of_their_own_layout(cache, tmp_path):
    recipe = open_cache(cache).spec.array.image
    for height, width, expected in ((64, 64, "square"), (64, 120, "square"), (64, 512, "wide"), (256, 64, "tall")):
        assert layout(structs.replace(recipe, height=height, width=width)) == expected
    page = page_of(make_cache(tmp_path / "cache", np.zeros((2, 2, 8, 64), np.float32)), tmp_path)
    assert [attributes.get("class") for tag, attributes in page.tags if tag == "main"] == ["wide"]


@pytest.mark.parametrize("shards", [1, 2, 3, 10, 1_000])
def test_throughput_is_drawn_over_shard_numbers(shards, cache):
    """Of one shard the axis read -0, -0, -0, 0, 0, 0, 0."""
    record = read_commit(cache, 0)
    contents = [structs.replace(record.content, shard=shard) for shard in range(shards)]
    figure = plots.throughput([structs.replace(record, content=content) for content in contents], plots.LIGHT)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    left, right = axes.get_xlim()
    assert left < 0 <= shards - 1 < right
    labels = [tick.label1.get_text() for tick in axes.xaxis.get_major_ticks() if left <= tick.get_loc() <= right]
    assert labels[0] == "0"
    assert len(set(labels)) == len(labels)
    assert {int(label.replace(",", "")) for label in labels} <= set(range(shards))


def test_rejects_come_from_the_sealed_table_alone(tmp_path):
    """A shard whose rows are all rejected: nothing else of the page reads its table."""
    cache = make_cache(tmp_path / "cache", latents(), rejected=range(8, 16))
    assert len(draw_rejects(open_cache(cache), 8, seed=0)) == 8
    path = cache / samples_file(1)
    pq.write_table(pq.read_table(path, partitioning=None), path, compression="none")
    with pytest.raises(CacheError, match=r"samples/000001\.parquet is not as sealed"):
        draw_rejects(open_cache(cache), 8, seed=0)


def test_one_seed_gives_one_page_and_another_other_rows(cache, tmp_path):
    pages = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        config = GalleryConfig(output=str(tmp_path / f"{name}.html"), rows=2, seed=seed)
        make_gallery(cache, config)
        pages.append(config.page.read_text())
    assert pages[0] == pages[1]
    rows = [re.findall(r"latent preview of row (\d+)", page)[:2] for page in pages]
    assert rows[0] == rows[1] != rows[2]
    drawn = [{each["row"] for each in draw_rejects(open_cache(cache), 2, seed)} for seed in (0, 1)]
    assert [len(each) for each in drawn] == [2, 2]
    assert all(each < set(REJECTED) for each in drawn)
    assert "2 of them, drawn with seed 1, are shown" in Elements(pages[2]).text


def test_both_store_forms_give_the_same_rows_and_pictures(page, tmp_path):
    tars = write_cache(tmp_path / "tars", "webdataset")
    assert page.alt("latent preview") == page_of(tars, tmp_path).alt("latent preview")


@pytest.mark.parametrize(
    ("group", "problem"),
    [("encode_once.images", "source.path: SOURCE does not exist"), ("none", "no installed package reads sources")],
)
def test_sources_that_cannot_be_had_are_told_once(tmp_path, monkeypatch, group, problem):
    monkeypatch.setattr(source_images, "GROUP", group)
    cache, source = write_cache(tmp_path / "cache"), tmp_path / "images"
    give_sources(cache, source)
    source.rmdir()
    page = page_of(cache, tmp_path)
    assert f"No source images: {problem.replace('SOURCE', str(source))}" in page.text
    assert len(page.alt("latent preview")) == 12


def test_the_preview_is_the_seals_linear_map(cache):
    summary = open_cache(cache).seal.array
    latent = latents()[0]
    expected = np.tensordot(np.array(summary.preview.weight), latent, 1) + np.array(summary.preview.bias)[:, None, None]
    assert (
        np.abs(preview(latent, summary.preview) / 255 - np.clip(expected, 0, 1).transpose(1, 2, 0)).max()
        <= 0.5 / 255 + 1e-9
    )


def test_of_many_features_a_gallery_looks_at_some_evenly_spaced(tmp_path, monkeypatch):
    samples = np.random.default_rng(0).standard_normal((8, 3, 1_152)).astype(np.float32)
    samples[5] += 50
    opened = open_cache(make_cache(tmp_path / "cache", samples, dtype="float32"))
    seen = survey_latents(opened, draw_survey(opened, 240, seed=0))
    assert seen.feature_F.tolist() == list(range(0, 1_152, 12))
    assert seen.count_FB.sum() == 8 * 3 * 96
    (first,) = most_unusual(seen, 1)
    assert first.number == 5
    assert int(re.fullmatch(r"mean of feature (\d+) at \+2\.6 σ", first.why)[1]) in seen.feature_F
    monkeypatch.setattr("cache_store.gallery.unusual.MOST_FEATURES", 4)  # each takes time to draw
    make_gallery(opened.store, GalleryConfig(output=str(tmp_path / "page.html")))
    words = " ".join((tmp_path / "page.html").read_text().split())
    assert "8 samples, all that are cached; 4 features of 1,152, evenly spaced." in words


def test_wide_channel_maps_lie_in_shorter_lines():
    sizes = (28, 28), (28, 42), (6, 12), (6, 24), (8, 64), (1, 4_096), (32, 8)
    assert [strip_columns(height, width) for height, width in sizes] == [8, 8, 8, 4, 4, 1, 8]


@pytest.mark.parametrize(("channels", "size"), [(4, (26, 6)), (16, (54, 14)), (10, (54, 14))])
def test_a_strip_shows_every_channel_on_one_scale(tmp_path, channels, size):
    plus_and_minus_one = np.ones((2, channels, 6, 5), np.float32) * np.array([1, -1])[:, None, None, None]
    latent = np.zeros((channels, 6, 5), np.float32)
    latent[-1] = 3.0
    strip = channel_strip(latent, open_cache(make_cache(tmp_path / "cache", plus_and_minus_one)).seal.array)
    assert strip.size == size
    shades = strip.convert("RGBA").getcolors()
    assert sorted(count for count, colour in shades if colour[3]) == [30, 30 * (channels - 1)]


def test_psnr_of_known_pairs_and_errors_saturate():
    grey, black = np.full((8, 8, 3), 100, np.uint8), np.zeros((2, 2, 3), np.uint8)
    assert psnr(grey, grey) == math.inf
    assert psnr(grey, grey + 1) == pytest.approx(20 * math.log10(255))
    assert psnr(grey - 100, grey + 155) == 0.0
    dark, bright, beyond = (error_map(black, black + np.uint8(level))[0, 0].sum() for level in (0, 64, 200))
    assert dark < bright == beyond


def test_a_huge_cache_is_drawn_from_not_read(tmp_path, monkeypatch):
    """Shards that no draw touches may be gone."""
    monkeypatch.setattr(draw, "SURVEY_SAMPLES", 12)
    monkeypatch.setattr(draw, "SURVEY_SHARDS", 3)
    path = make_cache(tmp_path / "cache", np.random.default_rng(0).standard_normal((240, 4, 6, 5), np.float32))
    cache = open_cache(path)
    drawn = draw_survey(cache, 240, seed=0)
    assert (len(drawn.number_N), drawn.shards, drawn.is_whole) == (12, 3, False)
    touched = {int(number) // 8 for number in (*drawn.number_N, *random_numbers(cache, 4, seed=0))}
    for shard in set(range(30)) - touched:
        (path / samples_file(shard)).unlink()
        (path / "latents" / "c" / str(shard) / "0" / "0" / "0").unlink()
    page = page_of(path, tmp_path, rows=4)
    assert "12 samples out of 3 shards, drawn with seed 0; the other 228 were not looked at" in page.words


def test_draws_are_without_repetition_and_in_order():
    for count, wanted in ((1, 1), (5, 9), (100, 7), (10**12, 50)):
        drawn = draw.draw_numbers(count, wanted, np.random.default_rng(0))
        assert len(drawn) == min(count, wanted)
        assert (np.diff(drawn) > 0).all()
        assert 0 <= drawn.min() <= drawn.max() < count


def test_contact_sheets_lie_beside_the_page_or_in_a_folder(cache, tmp_path):
    config = GalleryConfig(output=str(tmp_path / "a.html"), rows=2)
    made = make_gallery(cache, config)
    assert made.sheets == tuple(tmp_path / f"a.{kind}.png" for kind in ("random", "unusual", "rejected"))
    for sheet in made.sheets:
        with Image.open(sheet) as image:
            assert image.format == "PNG"
    (tmp_path / "sheets").mkdir()
    in_folder = replace(config, sheets=str(tmp_path / "sheets"))
    assert make_gallery(cache, in_folder).sheets[0] == tmp_path / "sheets" / "a.random.png"
    make_gallery(make_cache(tmp_path / "whole", latents()), config)
    assert not config.sheet("rejected").exists(), "there are none now"
    assert "None: all 30 planned rows are cached." in config.page.read_text()


LONG_ID = "a_folder/with_a_long_name/" + 12 * "0123456789"
LONG_REASON = "cannot decode: UnidentifiedImageError: cannot identify image file <_io.BytesIO object at 0x7f6609038050>"


@pytest.mark.parametrize(("height", "width"), [(224, 224), (64, 512), (256, 64)])
def test_labels_of_a_sheet_neither_touch_nor_leave_it(cache, height, width):
    exhibits = [Exhibit(row=row, id=LONG_ID, uri="", size=None, caption="", reason=LONG_REASON) for row in range(9)]
    recipe = structs.replace(open_cache(cache).spec.array.image, height=height, width=width)
    sheet = np.asarray(Image.open(io.BytesIO(contact_sheet("title", exhibits, recipe))).convert("L"))
    column = max(sheets.COLUMN, sheets.fitted(recipe)[1]) + sheets.MARGIN
    assert (sheet[:, -1] == 255).all()
    for right in range(column, sheet.shape[1], column):
        assert (sheet[:, right + 1 : right + sheets.MARGIN - 1] == 255).all()


def test_a_sheets_label_shows_id_and_reason_whole_where_they_fit():
    exhibit = Exhibit(row=7, id="000123456", uri="", size=None, caption="", reason=LONG_REASON)
    first, *reason = sheets.label(exhibit, sheets.COLUMN)
    assert first == "row 7 · 000123456"
    assert " ".join(reason) == LONG_REASON
    cut = sheets.wrapped(10 * LONG_ID, sheets.COLUMN, 2)
    assert len(cut) == 2
    assert cut[1].endswith("…")
    assert max(map(sheets.text_width, cut)) <= sheets.COLUMN


@pytest.mark.parametrize("name", ["latents/c/0/0/0/0", "seal.json"])
def test_damage_stops_the_page_and_keeps_the_earlier_one(tmp_path, capsys, name):
    cache, page = write_cache(tmp_path / "cache"), tmp_path / "page.html"
    page.write_text("earlier")
    flip(cache / name, 0) if "latents" in name else (cache / name).unlink()
    assert main(["gallery", str(cache), "-o", str(page)]) == 1
    assert ("row 0 in shard 0" if "latents" in name else "is not sealed") in capsys.readouterr().err
    assert page.read_text() == "earlier"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "nowhere/page.html"], "--output: the folder of nowhere/page.html does not exist"),
        (["-o", "."], "--output: . is a folder"),
        (["-o", "CACHE/zarr.json"], "CACHE/zarr.json lies in the cache"),
        (["--sheets", "nowhere"], "--sheets: nowhere is not a folder that exists"),
        (["--sheets", "CACHE"], "lies in the cache CACHE"),
        (["--rows", "0"], "--rows must be in [1, 256], got 0"),
        (["--rows", "10000"], "--rows must be in [1, 256], got 10000"),
        (["--seed", "-1"], "--seed must be at least 0, got -1"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(cache, tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    assert main(["gallery", str(cache), *(option.replace("CACHE", str(cache)) for option in options)]) == 2
    error = capsys.readouterr().err
    assert message.replace("CACHE", str(cache)) in error
    assert error.count("\n") == 1
    assert not [*tmp_path.iterdir()]
    assert verify(cache, "full").findings == ()


def test_the_command_tells_what_it_wrote_without_torch_or_pyplot(tmp_path):
    cache = write_cache(tmp_path / "cache")
    give_sources(cache, tmp_path / "images", sample_000000=png_bytes((255, 0, 0)))
    code = (
        "import sys; from cache_store.cli import main; assert main(sys.argv[1:]) == 0;"
        "assert 'precompute.gallery.source_images' in sys.modules;"
        "sys.exit(bool({'torch', 'matplotlib.pyplot'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "gallery", str(cache), "-o", str(tmp_path / "page.html"), "--rows", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 random rows, the 3 most unusual of 27 surveyed, 3 rejected rows\nwrote ")


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")
def test_a_browser_shows_the_page_without_complaint(tmp_path):
    cache = write_cache(tmp_path / "cache")
    colour = (10, 200, 30)
    give_sources(cache, tmp_path / "images", **{f"sample_{row:06d}": png_bytes(colour) for row in range(ROWS)})
    page_of(cache, tmp_path, rows=3)
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,900"),
    ]
    command = [str(CHROMIUM), *options, f"--screenshot={tmp_path / 'shot.png'}", f"file://{tmp_path / 'gallery.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr
    shot = np.asarray(Image.open(tmp_path / "shot.png").convert("RGB")).astype(int)
    assert (np.abs(shot - colour).max(-1) < 10).mean() > 0.01, "the source images"
    assert len(np.unique(shot.reshape(-1, 3), axis=0)) > 200, "previews and strips"
