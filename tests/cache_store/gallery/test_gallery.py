"""The gallery: one self-contained page that shows the right rows and trusts no text."""

import base64
import io
import math
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cache_store.cache.entry_points import find_source_images
from cache_store.cache.metadata import write_build
from cache_store.cache.reader import open_cache
from cache_store.cache.writer import Outcome
from cache_store.cli import main
from cache_store.errors import SourceError
from cache_store.gallery import pictures, rows
from cache_store.gallery.gallery import make_gallery
from cache_store.options import GalleryConfig
from cache_store.verify.verify import verify
from tests.make_cache import caption, make_cache
from tests.named import assert_names

HERE = Path(__file__).parents[1] / "format"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ROWS, REJECTED = 30, (3, 9, 29)
LATENTS = np.random.default_rng(5).standard_normal((ROWS, 4, 6, 5)).astype(np.float32)
HOSTILE_ID = '<script>alert("id")</script>'
HOSTILE_CAPTION = '"><img src=http://example.org/x onerror=alert(1)> {{ 7 * 7 }} $\\frac{ 🟥'


def outcome(row: int, is_rejected: bool) -> Outcome:
    content_sha256 = None if row == REJECTED[0] else "0" * 64
    return Outcome(content_sha256=content_sha256, width=9_000, height=70, reason="too large" if is_rejected else None)


def write_cache(path: Path, store_format: str = "zarr") -> Path:
    """Write a cache whose source is the folder `images` beside it."""
    ids = [HOSTILE_ID if row == 4 else f"sample-{row:06d}" for row in range(ROWS)]
    conversations = [caption(HOSTILE_CAPTION if row == 5 else f"this is {name}") for row, name in enumerate(ids)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.make_cache.outcome", outcome)
        make_cache(path, LATENTS, ids, conversations, rejected=REJECTED, store_format=store_format)
    source, image = {"kind": "folder", "path": str(path.parent / "images")}, {"height": 48, "width": 40}
    write_build(path, {"source": source, "encoder": {"model": "org/name"}, "image": image, "store": {}})
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A cache and source images: another picture for row 0, a broken one for row 1, none for row 2, one for row 3."""
    cache = write_cache(tmp_path_factory.mktemp("gallery") / "cache")
    images = cache.parent / "images"
    images.mkdir()
    (images / "sample-000001.png").write_bytes(b"no image")
    for row in (0, REJECTED[0]):
        Image.new("RGB", (64, 48), (255, 0, 0)).save(images / f"sample-{row:06d}.png")
    return cache


@pytest.fixture(scope="module")
def page(cache: Path) -> str:
    """The page of every row of `cache`, written beside it by the command."""
    path = cache.parent / "gallery.html"
    code = (
        "import sys; from cache_store.cli import main; assert main(sys.argv[1:]) == 0;"
        "assert 'precompute.source_images' in sys.modules;"
        "sys.exit('needless' if {'torch', 'matplotlib'} & set(sys.modules) else 0)"
    )
    command = [sys.executable, "-c", code, "gallery", str(cache), "-o", str(path), "--rows", str(ROWS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("27 random rows, 3 rejected rows\nwrote ")
    return path.read_text()


def page_of(cache: Path, path: Path, num_rows: int = 2, seed: int = 0) -> str:
    make_gallery(cache, GalleryConfig(output=str(path), rows=num_rows, seed=seed))
    return path.read_text()


def text_of(html: str) -> str:
    return " ".join(unescape(re.sub(r"<style>.*?</style>|<[^>]*>", "", html, flags=re.DOTALL)).split())


def images_of(html: str, alt: str) -> list[bytes]:
    """Return the files of the images whose alternative text begins with `alt`."""
    uris = re.findall(rf'<img [^>]*src="data:image/\w+;base64,([^"]*)" alt="{alt}\b', html)
    return [base64.b64decode(uri, validate=True) for uri in uris]


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")
def test_a_browser_shows_the_page_without_complaint(page, cache, tmp_path):
    options = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    options += " --disable-component-update --disable-sync --enable-logging=stderr --window-size=1400,900"
    files = f"--user-data-dir={tmp_path}/profile --screenshot={tmp_path}/shot.png file://{cache.parent}/gallery.html"
    command = [str(CHROMIUM), *options.split(), *files.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr
    shot = np.asarray(Image.open(tmp_path / "shot.png").convert("RGB"))
    assert len(np.unique(shot.reshape(-1, 3), axis=0)) > 100, "previews"


def test_the_page_refers_to_nothing_outside_itself(page):
    assert {"script", "link", "iframe", "object", "base"}.isdisjoint(re.findall(r"<(\w+)", page))
    assert not re.search(r"href=|url\(|@import", page)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert f'http-equiv="Content-Security-Policy" content="{policy}"' in page
    uris = re.findall(r'(?:src|srcset)="([^"]*)"', page)
    assert len(uris) > 27, "a preview of each row"
    for _, data in (uri.split(";base64,") for uri in uris):
        Image.open(io.BytesIO(base64.b64decode(data, validate=True))).load()


def test_texts_are_shown_as_text_and_sizes_by_their_names(page):
    """The array has 6 x 5 cells, images 70 x 9,000 pixels."""
    sizes = "1 sizeof images: 40x48, squash", "40x48: channel 4, latent_y 6, latent_x 5", "70 high × 9,000 wide"
    for told in (HOSTILE_ID, HOSTILE_CAPTION, *sizes, "3 of 30 planned rows have no latent"):
        assert told in text_of(page)
    for never in (HOSTILE_ID, HOSTILE_CAPTION, "48x40", "9,000 high"):
        assert never not in page
    _, *rejects = page.split('<article class="card reject">')
    for row, html in zip(REJECTED, rejects, strict=True):
        for told in ("too large", f">sample-{row:06d}<", f"sample-{row:06d}.png", f"this is sample-{row:06d}"):
            assert told in html


def test_source_images_are_shown_or_said_missing_or_changed(cache, page, monkeypatch):
    assert [len(images_of(page, f"source image of row {row}")) for row in (0, 1, *REJECTED[:2])] == [1, 0, 1, 0]
    thumbnail = Image.open(io.BytesIO(images_of(page, "source image of row 0")[0]))
    assert thumbnail.size == (40, 48), "the recipe's size: as the encoder saw it"
    assert np.abs(np.asarray(thumbnail).astype(int) - (255, 0, 0)).max() < 8
    for told in ("source (changed)", "cannot decode: is ", "missing: sample-000002.png: No such file or directory"):
        assert told in text_of(page)
    monkeypatch.setitem(sys.modules, "precompute.source_images", None)
    with pytest.raises(SourceError, match="`pip install "):
        find_source_images(open_cache(cache).store)


def test_one_seed_gives_one_page_and_another_other_rows(cache, tmp_path):
    tars = write_cache(tmp_path / "tars", "webdataset")
    scenes = {"a": (cache, 0), "b": (cache, 0), "tars": (tars, 0), "c": (cache, 1)}
    pages = {name: page_of(path, tmp_path / f"{name}.html", seed=seed) for name, (path, seed) in scenes.items()}
    assert pages["a"] == pages["b"]
    assert images_of(pages["a"], "latent preview") == images_of(pages["tars"], "latent preview")
    problem = f"No source images: source.path: {tmp_path / 'images'} does not exist"
    assert text_of(pages["tars"]).count(problem) == 1, "told once, not at every row"
    first, other = (re.findall(r"latent preview of row (\d+)", pages[name])[:2] for name in "ac")
    assert first != other
    assert "2 of them, drawn with seed 1, are shown" in text_of(pages["c"])


def test_previews_and_psnr_are_what_they_say(cache):
    to_rgb, latent = open_cache(cache).seal.array.preview, LATENTS[0]
    expected = np.tensordot(np.array(to_rgb.weight), latent, 1) + np.array(to_rgb.bias)[:, None, None]
    error = pictures.preview(latent, to_rgb) / 255 - np.clip(expected, 0, 1).transpose(1, 2, 0)
    assert np.abs(error).max() <= 0.5 / 255 + 1e-9
    grey = np.full((8, 8, 3), 100, np.uint8)
    found = [pictures.psnr(*pair) for pair in ((grey, grey), (grey, grey + 1), (grey - 100, grey + 155))]
    assert found == [math.inf, pytest.approx(20 * math.log10(255)), 0.0]


@pytest.mark.parametrize("form", ["", "_tars"])
def test_a_cache_of_two_sizes_shows_each_row_in_its_own(tmp_path, form):
    """Also in the histograms, in which a latent's size does not matter."""
    config = GalleryConfig(output=str(tmp_path / "a.html"))
    content = make_gallery(HERE / f"golden_sizes{form}", config)
    shapes = [exhibit.array.shape for exhibit in (*content.shown, *content.rejected)]
    assert {shape: shapes.count(shape) for shape in shapes} == {(2, 2, 3): 6, (2, 4, 1): 6}
    for exhibit in content.shown:
        assert exhibit.preview.shape[0] * exhibit.array.shape[2] == exhibit.preview.shape[1] * exhibit.array.shape[1]
    page = text_of(config.page.read_text())
    assert "24x16: channel 2, latent_y 2, latent_x 3" in page
    assert "8x32: channel 2, latent_y 4, latent_x 1" in page
    assert sum(each.count_B.sum() for each in content.histograms) == sum(
        np.prod(exhibit.array.shape) for exhibit in content.shown
    )


def clips_cache(path: Path) -> Path:
    """Write clips of 17 frames and of 33, 16 x 24 pixels each; row 1 is rejected."""
    random = np.random.default_rng(3)
    latents = [random.standard_normal((3, 4, frames, 2, 3), np.float32) for frames in (5, 9)]
    return make_cache(path, latents, clips=True, rejected=[1])


def clip_of(start: float, frames: int) -> np.ndarray:
    """Return frames [T, Y, X, 3] whose red is the frame's number, green the clip's start in halves of a second."""
    red_T = np.arange(frames)[:, None, None, None] * np.array([1, 0, 0])
    return (np.zeros((frames, 16, 24, 3)) + red_T + np.array([0, 2 * start, 0])).astype(np.uint8)


def frames_in(strip: np.ndarray, count: int) -> list[list[int]]:
    return [strip[8, round((place + 0.5) * strip.shape[1] / count)].tolist() for place in range(count)]


def test_a_clip_is_a_strip_of_its_frames_from_the_first_to_the_last(tmp_path):
    """Source, preview and decoded frames are in step; PSNR is over all frames shown."""

    def read_clip(sample, array):
        start = sample["clip_start"]
        return clip_of(start, array.size.frames), f"{int(2 * start):064x}"

    def decode(stored):
        return np.stack([clip_of(0.0, 4 * stored.shape[2] - 3)] * len(stored))

    cache = open_cache(clips_cache(tmp_path / "cache"))
    showcase = rows.Showcase(cache=cache, read_image=read_clip, decode=decode)
    shown = [exhibit for _, exhibit in sorted(showcase.cached(range(5)).items())]
    assert [(each.row, each.frames, each.source_problem) for each in shown] == [
        (row, 5 if row < 3 else 8, None) for row in (0, 2, 3, 4, 5)
    ]
    assert frames_in(shown[1].source, 5) == [[frame, 2, 0] for frame in (0, 4, 8, 12, 16)]
    assert frames_in(shown[4].source, 8) == [[frame, 5, 0] for frame in (0, 5, 9, 14, 18, 23, 27, 32)]
    assert frames_in(shown[4].decoded, 8) == [[frame, 0, 0] for frame in (0, 5, 9, 14, 18, 23, 27, 32)]
    assert [each.psnr for each in shown[:2]] == [math.inf, pytest.approx(10 * math.log10(255**2 * 3 / 2**2))]
    latent, to_rgb = cache.read(np.array([4]))[0], cache.seal.array.preview
    expected = [pictures.preview(latent[:, frame].astype(np.float32), to_rgb) for frame in (0, 1, 2, 3, 5, 6, 7, 8)]
    np.testing.assert_array_equal(shown[4].preview, pictures.side_by_side(expected))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--output", path) for path in ("nowhere/page.html", ".", "CACHE/zarr.json", "s3://bucket/page.html")),
        *(("--rows", "257"), ("--seed", "-1")),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(cache, tmp_path, monkeypatch, capsys, option, value):
    monkeypatch.chdir(tmp_path)
    value = value.replace("CACHE", str(cache))
    assert main(["gallery", str(cache), f"{option}={value}"]) == 2
    error = capsys.readouterr().err
    assert_names(error, f"{option.removeprefix('--')} {value}")
    assert error.count("\n") == 1
    assert not [*tmp_path.iterdir()]
    assert verify(cache, "full").findings == ()


def test_rows_that_are_asked_for_are_shown_in_place_of_random_ones(tmp_path, capsys):
    cache, page = str(HERE / "golden_images"), tmp_path / "a.html"
    assert main(["gallery", cache, "-o", str(page)]) == 0
    assert main(["gallery", cache, "-o", str(page), "--where", 'row == 4 or id == "sample-000001"']) == 0
    assert "2 chosen rows, 1 rejected row" in capsys.readouterr().out
    html = page.read_text()
    assert "the first for which <code>row == 4 or id == &#34;sample-000001&#34;</code>" in html
    assert "sample-000004" in html
    assert "sample-000003" not in html
    assert main(["gallery", cache, "-o", str(page), "--where", "row == 2"]) == 2
    assert "is true for no cached sample" in capsys.readouterr().err
