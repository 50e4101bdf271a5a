"""Caches of clips, by the command line: what is cached and what rejected, and the same bytes however they are made."""

# Axes: T frames, Y X pixels, 3 RGB.

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from diffusers import AutoencoderKLWan
from PIL import Image

from cache_store import open_cache
from cache_store.cache.metadata import read_samples, read_spec
from cache_store.cli import main as cache_store
from cache_store.format.plan import caption_of
from cache_store.format.tables import CLIP_START
from cache_store.verify.verify import verify
from precompute.cli import main
from precompute.inputs import frames
from precompute.inputs.frames import ClipReader
from precompute.sources import image_store, place
from precompute.sources.config import SourceConfig
from precompute.sources.media import VIDEOS
from precompute.sources.opening import open_source
from tests.command_runs import quick_loading
from tests.named import assert_names
from tests.places import Folder, Objects
from tests.precompute.conftest import Project, plan_table
from tests.precompute.sources.pictures import write_tar
from tests.videos import add_silence, make_video

__all__ = ["quick_loading"]  # a fixture

FRAMES, FPS = 5, 12
CHUNK = {"frames": FRAMES, "fps": FPS, "pick": "chunk"}
OLD = (10**18, 10**18)
"""Times of all videos, in nanoseconds."""
BUCKETS = {"preset": "ours", "sizes": ["64x48", "48x64"]}
SIZE = (64, 48)
"""Width and height of clips, and of most videos."""


class Made(NamedTuple):
    frames: int = 24
    rate: int = 24
    codec: str = "h264"
    size: tuple[int, int] = SIZE
    caption: str | None = None
    more: Mapping[str, Any] = MappingProxyType({})

    @property
    def firsts(self) -> Sequence[int]:
        """Where its clips begin, in frames at FPS: one after the other."""
        return range(0, self.frames * FPS // self.rate - FRAMES + 1, FRAMES)


GOOD = {
    "a.mp4": Made(caption="A gradient."),
    "b.mp4": Made(codec="hevc", caption=""),
    "c.webm": Made(codec="vp9", frames=36),
    "d.mp4": Made(codec="av1", frames=12),
    "e.avi": Made(codec="mpeg4"),
    "f.webm": Made(codec="vp8", caption="Of the sixth."),
    "in/g.mov": Made(frames=23, more={"rotation": 90, "audio": 0.5}),
    "in/slow.mkv": Made(frames=10, rate=10, size=(32, 24)),
}
BROKEN = {
    "short.mp4": "too short: has 4 of 5 frames at 12 fps from 0 s",
    "sound.mp4": "no video stream: the file has none, or only pictures as its cover",
    "cut.mp4": "cannot decode: begins as MP4 or QuickTime, but has no video that can be read",
    "text.mp4": f"cannot decode: is text, no video: {('no video' * 5)!r}",
}
CLIPS = {f"{name}@{first}": first / FPS for name, video in sorted(GOOD.items()) for first in video.firsts}
"""Id and start of each clip that is cached."""


def write_videos(folder: Path) -> Path:
    (folder / "in").mkdir(parents=True)
    for name, video in GOOD.items():
        path = folder / name
        make_video(path, codec=video.codec, frames=video.frames, fps=video.rate, size=video.size, **video.more)
        if video.caption is not None:
            path.with_suffix(".txt").write_text(video.caption)
    make_video(folder / "short.mp4", frames=8)
    with av.open(str(folder / "sound.mp4"), "w") as container:
        add_silence(container, 0.5)
    whole = (folder / "a.mp4").read_bytes()
    (folder / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (folder / "text.mp4").write_text("no video" * 100)
    (folder / "cover.jpg").write_bytes(b"no sample")
    for path in folder.rglob("*.*"):
        os.utime(path, ns=OLD)
    return folder


def settings_of(videos: Path | str, **more: Any) -> dict[str, Any]:
    return {
        "source": {"kind": "folder", "path": str(videos)},
        "image": {"height": SIZE[1], "width": SIZE[0]},
        "clip": CHUNK,
        "encoder__batch_size": 2,
        "store__samples_per_shard": 6,
        "store__dtype": "float32",
        "run__max_reject_fraction": 0.5,
        **more,
    }


@pytest.fixture(scope="session")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of videos; tests that change it copy it."""
    return write_videos(tmp_path_factory.mktemp("source") / "videos")


@pytest.fixture
def project(tmp_path: Path, vae_path: Path, capsys: pytest.CaptureFixture[str], videos: Path) -> Project:
    project = Project(tmp_path, vae_path, capsys)
    project.source = videos
    project.settings = settings_of(videos)
    return project


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory, vae_path: Path, videos: Path) -> Path:
    project = Project(tmp_path_factory.mktemp("clips"), vae_path, None)
    project.settings = settings_of(videos)
    assert main(["build", "--config", str(project.config())]) == 0
    return project.cache


@pytest.fixture
def built(project: Project, built_once: Path) -> Project:
    project.place.mirror(Folder(built_once))
    return project


def samples_of(cache: Path | str, *columns: str) -> list[dict[str, Any]]:
    opened = open_cache(cache)
    return opened.samples(np.arange(len(opened)), list(columns)).to_pylist()


def rejects_of(cache: Path) -> dict[str, str]:
    shards = (read_samples(cache, shard, ["id", "reason"]) for shard in range(read_spec(cache).num_shards))
    return {each["id"]: each["reason"] for shard in shards for each in shard.to_pylist() if each["reason"]}


def seen_by_pyav(path: Path, start: float, rate: int, frames: int = FRAMES) -> np.ndarray:
    """Return the frames of a video shown from `start` on: uint8 [T, Y, X, 3]."""
    with av.open(str(path)) as container:
        images = [frame.to_image().rotate(frame.rotation, expand=True) for frame in container.decode(video=0)]
    numbers = [int((start + j / FPS + 0.001) * rate) for j in range(frames)]
    resized = [images[each].resize(SIZE, Image.Resampling.BILINEAR) for each in numbers]
    return np.stack([np.asarray(each) for each in resized])


def test_a_folder_of_videos_becomes_a_cache_of_clips(built):
    cache = open_cache(built.cache)
    assert cache.seal.reasons == {"too short": 1, "no video stream": 1, "cannot decode": 2}
    samples = samples_of(built.cache, "id", "uri", CLIP_START, "width", "height", "conversations")
    assert [(each["id"], each[CLIP_START]) for each in samples] == [*CLIPS.items()]
    for each in samples:
        video = GOOD[each["uri"]]
        assert each["id"].startswith(f"{each['uri']}@")
        assert (each["width"], each["height"]) == video.size
        assert caption_of(each["conversations"]) == video.caption
    assert cache.spec.arrays[0].shape == (16, 2, 6, 8)
    assert rejects_of(built.cache) == {f"{name}@0": reason for name, reason in BROKEN.items()}
    assert not verify(built.cache, "deep").findings


def test_latents_are_diffusers_own_of_pyavs_frames(project):
    """Of one video at half its rate, of another where each frame is shown once or twice, and is scaled up.

    A clip has the largest of several lengths that its video has.
    """
    lengths = [FRAMES, 9]
    project.build(clip={**CHUNK, "frames": lengths}, image={"buckets": BUCKETS})
    model, cache = AutoencoderKLWan.from_pretrained(project.vae, subfolder="vae"), open_cache(project.cache)
    found = {}
    for number, sample in enumerate(samples_of(project.cache, "id", "uri", CLIP_START)):
        size, video = cache.array_of(np.array([number])).size, GOOD[sample["uri"]]
        found[sample["id"]] = size.name
        seen = seen_by_pyav(project.source / sample["uri"], sample[CLIP_START], video.rate, size.frames)
        with torch.inference_mode():
            pixels = torch.from_numpy(seen).permute(3, 0, 1, 2)[None] / 127.5 - 1
            (expected,) = model.encode(pixels).latent_dist.mode().numpy()
        np.testing.assert_allclose(cache.read(np.array([number]))[0], expected, rtol=0, atol=1e-5)
    expected = {}
    for name, video in GOOD.items():
        available = video.frames * FPS // video.rate
        length = max(each for each in lengths if each <= available)
        firsts = range(0, available - length + 1, length)
        expected |= {f"{name}@{first}": f"{length}x64x48" for first in firsts}
    assert found == expected


def test_clips_of_interlaced_frames_are_counted(project):
    (project.folder / "odd").mkdir()
    make_video(project.folder / "odd/lines.mp4", options={"x264-params": "tff=1"})
    project.settings = settings_of(project.folder / "odd", clip={**CHUNK, "frames": 9})
    assert "interlaced frames in 1 cached clip, encoded as progressive" in project.build()
    assert "interlaced frames" in project.run(cache_store, "info", project.cache)


# Which parts of a video are read.


def noted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """Return the arguments of a function's calls, as they happen."""
    calls, function = list[tuple[Any, ...]](), getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: (calls.append(given), function(*given))[1])
    return calls


def test_a_video_too_large_for_memory_is_read_in_place_and_hashed_once(built, bucket, server, monkeypatch):
    """Whether it lies in a folder, a tar or a store of objects."""
    videos = Objects(f"{bucket}/videos", server.endpoint)
    videos.mirror(Folder(built.source))
    monkeypatch.setattr(image_store, "MAX_FILE_BYTES", 1_000)
    monkeypatch.setattr(place.refuse_large, "__defaults__", (1_000,))
    hashed = noted(monkeypatch, frames.hashlib, "file_digest")
    tar = shutil.make_archive(str(built.folder / "videos"), "tar", built.source)
    for number, path in enumerate([built.source, videos.address, tar]):
        hashed.clear()
        built.build(name=f"large-{number}", source={"kind": "folder", "path": str(path)}, run__workers=1)
        assert open_cache(built.folder / f"large-{number}").identity == open_cache(built.cache).identity
        assert len(hashed) == len({stream.version for stream, _ in hashed}) >= len(GOOD)


def test_a_rerun_looks_at_changed_videos_alone(project, videos, monkeypatch):
    """A mended one is tried again, and its further clips are added."""
    project.source = shutil.copytree(videos, project.folder / "videos")
    project.settings = settings_of(project.source)
    project.build()
    probed = noted(monkeypatch, ClipReader, "_probe")
    project.build()
    assert not probed
    shutil.copy(project.source / "b.mp4", project.source / "text.mp4")
    assert_names(project.build(code=1), "--extend text.mp4@5")
    assert [name for _, name, _ in probed] == ["text.mp4"]
    assert "recovered 1 of 4 " in project.build("--retry-rejected", "--extend")
    assert {each["id"] for each in samples_of(project.cache, "id")} == {*CLIPS, "text.mp4@0", "text.mp4@5"}
    assert not verify(project.cache, "full").findings


# Other sources.


def test_a_table_may_say_itself_where_clips_begin(project, monkeypatch):
    """None of its videos is looked at before it is encoded."""
    path, starts = project.folder / "list.csv", (0.0, 1 / 12)
    rows = [f"{name},{video.caption or ''},{name}#{at},{at}\n" for name, video in GOOD.items() for at in starts]
    path.write_text(f"video,text,id,{CLIP_START}\n{''.join(rows)}")
    source = {"kind": "table", "path": str(path), "images": str(project.source), "fields": {"extra": [CLIP_START]}}
    probed = noted(monkeypatch, ClipReader, "_probe")
    project.build(source=source, clip={"frames": FRAMES, "fps": FPS})
    assert not probed
    samples = samples_of(project.cache, "id", CLIP_START, "conversations")
    assert [each["id"] for each in samples] == [f"{name}#{at}" for name in GOOD for at in starts]
    for each in samples:
        name, _, start = each["id"].partition("#")
        assert each[CLIP_START] == float(start)
        assert caption_of(each["conversations"]) == (GOOD[name].caption or None)


@pytest.mark.parametrize("kind", ["webdataset", "parquet"])
def test_tars_and_tables_hold_videos(videos, tmp_path, kind):
    names = [name.replace("/", "_").rpartition(".")[::2] for name in GOOD]
    held = dict(zip(names, [(videos / name).read_bytes() for name in GOOD], strict=True))
    if kind == "webdataset":
        write_tar(tmp_path / "0.tar", {stem: {suffix: each} for (stem, suffix), each in held.items()})
    else:
        column = [{"bytes": each, "path": ".".join(name)} for name, each in held.items()]
        pq.write_table(pa.table({"id": [stem for stem, _ in held], "video": column}), tmp_path / "0.parquet")
    source = open_source(SourceConfig(kind=kind, path=str(tmp_path)), VIDEOS)
    found = {row["id"]: source.read(row["uri"]) for row in plan_table(source.samples()).to_pylist()}
    assert found == {stem: each for (stem, _), each in held.items()}
