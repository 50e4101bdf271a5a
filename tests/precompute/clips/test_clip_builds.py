"""Caches of clips, by the command line: what is cached and what rejected, and the same bytes however they are made."""

# Axes: T frames, Y X pixels, 3 RGB.

import csv
import hashlib
import json
import os
import shutil
import signal
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from diffusers import AutoencoderKLWan
from PIL import Image

from cache_store import open_cache, open_joined
from cache_store.cache.metadata import read_samples, read_spec
from cache_store.cli import main as cache_store
from cache_store.format.plan import caption_of
from cache_store.format.tables import CLIP_START
from cache_store.verify.verify import verify
from precompute.cli import main
from precompute.encode_images import encode_images
from precompute.inputs.frames import ClipReader
from precompute.sources import image_store, place
from precompute.sources import videos as video_files
from tests.command_runs import quick_loading
from tests.guarantees.programs import Program, die_at
from tests.named import assert_names
from tests.places import Folder, Objects
from tests.precompute.conftest import Project, flip, make_vae, timeless_files
from tests.precompute.encoders.text_models import save_text_encoder
from tests.precompute.sources.pictures import write_tar
from tests.videos import add_silence, make_video, scene

__all__ = ["quick_loading"]  # a fixture

FRAMES, FPS = 5, 12
OLD = (10**18, 10**18)
"""Times of all videos, in nanoseconds."""
SIZE = (64, 48)
"""Width and height of clips, and of most videos."""
ARRAY = "latents/5x64x48"


class Made(NamedTuple):
    """A video of the source."""

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
    "cut.mp4": "cannot decode: begins as MP4 or QuickTime, but is damaged or cut short",
    "text.mp4": "cannot decode: is text, not a video",
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
        "clip": {"frames": FRAMES, "fps": FPS, "pick": "chunk"},
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
    folder = tmp_path_factory.mktemp("clips")
    project = Project(folder, vae_path, None)
    project.settings = settings_of(videos)
    assert main(["build", "--config", str(project.config())]) == 0
    return project.cache


@pytest.fixture
def built(project: Project, built_once: Path) -> Project:
    """A project with its cache."""
    project.place.mirror(Folder(built_once))
    return project


@pytest.fixture
def own(built: Project) -> Project:
    """A built project whose videos may be changed."""
    built.source = shutil.copytree(built.source, built.folder / "videos")
    built.settings = settings_of(built.source)
    built.build()
    return built


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_encoder("T5EncoderModel", tmp_path_factory.mktemp("t5"))


def samples_of(cache: Path | str, *columns: str) -> list[dict[str, Any]]:
    opened = open_cache(cache)
    return opened.samples(np.arange(len(opened)), list(columns)).to_pylist()


def rejects_of(cache: Path) -> dict[str, str]:
    shards = (read_samples(cache, shard, ["id", "reason"]) for shard in range(read_spec(cache).num_shards))
    return {each["id"]: each["reason"] for shard in shards for each in shard.to_pylist() if each["reason"]}


def seen_by_pyav(path: Path, start: float, rate: int, frames: int = FRAMES) -> np.ndarray:
    """Decode a video of a constant rate, and choose the frames shown from `start` on: uint8 [T, Y, X, 3]."""
    with av.open(str(path)) as container:
        images = [frame.to_image().rotate(frame.rotation, expand=True) for frame in container.decode(video=0)]
    numbers = [int((start + j / FPS + 0.001) * rate) for j in range(frames)]
    resized = [images[each].resize(SIZE, Image.Resampling.BILINEAR) for each in numbers]
    return np.stack([np.asarray(each) for each in resized])


def test_a_folder_of_videos_becomes_a_cache_of_clips(built):
    """Each clip has its id, its start, and its video's caption and size; other videos are rejected with a reason."""
    cache = open_cache(built.cache)
    assert cache.seal.reasons == {"too short": 1, "no video stream": 1, "cannot decode": 2}
    samples = samples_of(built.cache, "id", "uri", CLIP_START, "width", "height", "conversations")
    assert [(each["id"], each[CLIP_START]) for each in samples] == sorted(CLIPS.items())
    for each in samples:
        video = GOOD[each["uri"]]
        assert each["id"].startswith(f"{each['uri']}@")
        assert (each["width"], each["height"]) == video.size
        assert caption_of(each["conversations"]) == video.caption
    assert cache.spec.arrays[0].shape == (16, 2, 6, 8)
    assert rejects_of(built.cache) == {f"{name}@0": reason for name, reason in BROKEN.items()}
    assert not verify(built.cache, "deep").findings


def test_latents_are_diffusers_own_of_pyavs_frames(built):
    """Of one video at half its rate, of another where each frame is shown once or twice, and is scaled up."""
    model = AutoencoderKLWan.from_pretrained(built.vae, subfolder="vae")
    cache, samples = open_cache(built.cache), samples_of(built.cache, "uri", CLIP_START)
    for number, sample in enumerate(samples):
        video = GOOD[sample["uri"]]
        seen = seen_by_pyav(built.source / sample["uri"], sample[CLIP_START], video.rate)
        with torch.inference_mode():
            pixels = torch.from_numpy(seen).permute(3, 0, 1, 2)[None] / 127.5 - 1
            (expected,) = model.encode(pixels).latent_dist.mode().numpy()
        np.testing.assert_allclose(cache.read(np.array([number]))[0], expected, rtol=0, atol=1e-5)


def test_clips_of_repeated_and_of_interlaced_frames_are_counted(project):
    """A slideshow shows two pictures for a second each; one clip has both."""
    project.source = project.folder / "odd"
    project.source.mkdir()
    make_video(project.source / "slides.mp4", frames=48, draw=lambda number, size: scene(number // 24 * 100, size))
    make_video(project.source / "moving.mp4", options={"x264-params": "tff=1"})
    project.settings = settings_of(project.source, clip={"frames": 9, "fps": FPS, "pick": "chunk"})
    said = project.build()
    assert "interlaced frames in 1 cached clip, encoded as progressive" in said
    assert "repeated frames in 2 cached clips, more than three quarters" in said
    assert "repeated frames" in project.run(cache_store, "info", project.cache)
    assert not verify(project.cache, "deep").findings


def test_without_a_rate_a_clip_has_consecutive_frames(project):
    project.build(clip={"frames": FRAMES, "fps": "source", "pick": "slide", "stride": 8})
    starts = {each["id"]: each[CLIP_START] for each in samples_of(project.cache, "id", CLIP_START)}
    expected = {
        f"{name}@{first}": first / video.rate
        for name, video in {**GOOD, "short.mp4": Made(frames=8)}.items()
        for first in range(0, video.frames - FRAMES + 1, 8)
    }
    assert starts == pytest.approx(expected)
    assert "5 frames" in project.run(cache_store, "info", project.cache)


@pytest.mark.parametrize("pick", ["head", "middle"])
def test_one_clip_of_a_video_has_the_videos_id(project, pick):
    project.build(clip={"frames": FRAMES, "fps": FPS, "pick": pick})
    starts = {each["id"]: each[CLIP_START] for each in samples_of(project.cache, "id", CLIP_START)}
    spare = {name: video.frames * FPS // video.rate - FRAMES for name, video in GOOD.items()}
    assert starts == pytest.approx({name: each // 2 / FPS * (pick == "middle") for name, each in spare.items()})


# The same bytes.


def test_workers_ranks_and_killed_builds_write_the_same_bytes(built, forked_workers):
    built.build(name="workers", run__workers=2)
    for step in ("plan", "build --rank 0 --world-size 2", "build --rank 1 --world-size 2", "seal"):
        name, *options = step.split()
        built.run(main, name, "--config", built.config("ranks"), *options)
    killed, steps = built.config("killed"), (5, 8, 12)
    line = ["precompute", "build", "--config", str(killed), "--cache", f"deadly://{built.folder / 'killed'}"]
    for step in steps:
        code, said = Program(line, built.folder, prepare=partial(die_at, step)).end()
        assert code == -signal.SIGKILL, said
    assert Folder(built.folder / "killed").files(), "it was killed before it wrote anything"
    built.build(name="killed")
    for name in ("workers", "ranks", "killed"):
        assert timeless_files(built.folder / name) == built.files(), name


def archive_of(project: Project, kind: str) -> Path:
    """Put all files into a tar, or uncompressed into a zip."""
    path = project.folder / f"videos.{kind}"
    if kind == "tar":
        shutil.make_archive(str(path.with_suffix("")), "tar", project.source)
        return path
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for each in sorted(project.source.rglob("*.*")):
            archive.write(each, each.relative_to(project.source))
    return path


def test_a_store_of_objects_gets_the_same_bytes(built, bucket, server):
    """And gives the same clips, if the videos lie there."""
    caches = Objects(f"{bucket}/caches", server.endpoint)
    built.run(main, "build", "--config", built.config(), "--cache", caches.below("a").address)
    assert caches.below("a").timeless() == built.files()
    videos = Objects(f"{bucket}/videos", server.endpoint)
    videos.mirror(Folder(built.source))
    built.build(name="far", source={"kind": "folder", "path": videos.address})
    assert open_cache(built.folder / "far").identity == open_cache(built.cache).identity


def test_a_video_in_a_store_of_objects_is_fetched_once_for_all_its_clips(built, bucket, server, monkeypatch):
    """And read once to check it, there or in a folder."""
    videos = Objects(f"{bucket}/videos", server.endpoint)
    videos.mirror(Folder(built.source))
    names, read = list[str](), image_store.ImageFolder._read

    def noted(self, name):
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(image_store.ImageFolder, "_read", noted)
    far = {"kind": "folder", "path": videos.address}
    for flags in ([], ["--check-sources"]):
        names.clear()
        built.build(*flags, name="far", source=far, run__decode_threads=4)
        assert {name: names.count(name) for name in GOOD} == dict.fromkeys(GOOD, 1)


def test_a_video_too_large_for_memory_is_read_in_place_and_hashed_once(built, bucket, server, monkeypatch):
    """Whether it lies in a folder, a tar or a store of objects."""
    videos = Objects(f"{bucket}/videos", server.endpoint)
    videos.mirror(Folder(built.source))
    monkeypatch.setattr(image_store, "MAX_FILE_BYTES", 1_000)
    monkeypatch.setattr(place.refuse_large, "__defaults__", (1_000,))
    digest, hashed = hashlib.file_digest, []

    def counted(stream, *kind):
        hashed.append(stream.version)
        return digest(stream, *kind)

    monkeypatch.setattr(video_files.hashlib, "file_digest", counted)
    for number, path in enumerate([built.source, videos.address, archive_of(built, "tar")]):
        hashed.clear()
        built.build(name=f"large-{number}", source={"kind": "folder", "path": str(path)}, run__workers=1)
        assert open_cache(built.folder / f"large-{number}").identity == open_cache(built.cache).identity
        assert len(hashed) == len({*hashed}) >= len(GOOD)


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_gives_the_same_clips(built, kind):
    archive = archive_of(built, kind)
    built.build(name="archive", source={"kind": "folder", "path": str(archive)})
    assert open_cache(built.folder / "archive").identity == open_cache(built.cache).identity


# Reruns.


@pytest.fixture
def probed(monkeypatch) -> list[str]:
    """Names of videos that are looked at for their length, as it happens."""
    names, probe = list[str](), ClipReader._probe

    def noted(self, uri, place):
        names.append(uri)
        return probe(self, uri, place)

    monkeypatch.setattr(ClipReader, "_probe", noted)
    return names


def test_a_finished_build_looks_at_no_video_again(own, probed):
    with own.untouched():
        assert "nothing to encode" in own.build()
    assert not probed


def test_new_videos_are_added_by_extend(own, probed):
    kept = own.place.marks()
    make_video(own.source / "aa.mp4", frames=24)
    said = own.build(code=1)
    assert_names(said, "--extend aa.mp4@0 aa.mp4@5")
    assert probed == ["aa.mp4"]
    own.build("--extend")
    assert {each["id"] for each in samples_of(own.cache, "id")} == {*CLIPS, "aa.mp4@0", "aa.mp4@5"}
    shards = [name for name in kept if name.startswith(("commits/00000[0-2]", f"{ARRAY}/c/0", f"{ARRAY}/c/1/"))]
    assert {name: kept[name] for name in shards} == {name: own.place.marks()[name] for name in shards}
    assert not verify(own.cache, "full").findings


def test_a_changed_video_is_found_by_its_date_or_by_its_content(own):
    """One that kept its size and date is found by --check-sources alone."""
    path = own.source / "c.webm"
    before = path.read_bytes()
    flip(path)
    os.utime(path, ns=OLD)
    with own.untouched():
        assert "nothing to encode" in own.build()
        assert_names(own.build("--check-sources", code=1), "c.webm@0 c.webm@5 c.webm@10")
        os.utime(path, ns=(1, 1))
        assert_names(own.build(code=1), "c.webm@0 c.webm@5 c.webm@10")
    path.write_bytes(before)
    assert "every encoded image is unchanged" in own.build("--check-sources")


def test_a_mended_video_is_cached_by_a_retry(own):
    shutil.copy(own.source / "b.mp4", own.source / "text.mp4")
    assert_names(own.build(code=1), "--extend text.mp4@5")
    assert "recovered 1 of 4 " in own.build("--retry-rejected", "--extend")
    assert {each["id"] for each in samples_of(own.cache, "id")} == {*CLIPS, "text.mp4@0", "text.mp4@5"}
    assert not verify(own.cache, "full").findings


def test_an_audit_is_sound_until_a_video_changes(own):
    assert f"{len(CLIPS)} of {len(CLIPS)}" in own.run(main, "audit", own.cache)
    make_video(own.source / "a.mp4", frames=24, gop=3)
    assert "a.mp4@0" in own.run(main, "audit", own.cache, code=1)


def test_a_flipped_bit_is_repaired_to_the_same_bytes(built):
    with built.same_in_the_end():
        built.place.flip(f"{ARRAY}/c/1/0/0/0/0")
        built.repair("--report", built.report())


def test_clips_are_withdrawn_and_stay_so(own):
    (own.folder / "ids.txt").write_text("c.webm@5\nsound.mp4@0\n")
    own.run(cache_store, "withdraw", own.cache, "--ids", own.folder / "ids.txt")
    own.build()
    assert {each["id"] for each in samples_of(own.cache, "id")} == {*CLIPS} - {"c.webm@5"}
    assert not verify(own.cache, "full").findings
    make_video(own.source / "z.mp4", frames=12)
    own.build("--extend")
    assert {each["id"] for each in samples_of(own.cache, "id")} == {*CLIPS, "z.mp4@0"} - {"c.webm@5"}


# Other caches of the same plan.


def test_another_vae_over_the_same_plan_joins_clip_by_clip(built, tmp_path):
    other = {"kind": "cache", "path": str(built.cache)}
    built.build(name="other", source=other, encoder__model=str(make_vae(tmp_path / "seed", 1)))
    joined = open_joined({"one": built.cache, "other": built.folder / "other"})
    assert len(joined) == len(CLIPS)
    one, two = (each.samples(np.arange(len(CLIPS)), ["id", CLIP_START]) for each in joined.caches.values())
    assert one == two
    latents = joined.read(np.arange(len(CLIPS)))
    assert latents["one"].shape == latents["other"].shape
    assert not np.allclose(latents["one"], latents["other"])


def test_captions_over_the_same_plan_join_clip_by_clip(built, t5):
    text = {"kind": "cache", "path": str(built.cache), "text": "caption"}
    more = {"encoder__model": str(t5), "encoder__max_tokens": 16, "store__dtype": "float16"}
    config = built.config("texts", source=text, run__max_reject_fraction=0.9, **more)
    values = yaml.safe_load(config.read_text())
    del values["image"], values["clip"]
    config.write_text(yaml.safe_dump(values))
    built.run(main, "build", "--config", config)
    joined = open_joined({"clips": built.cache, "texts": built.folder / "texts"})
    captioned = {name for name in CLIPS if GOOD[name.partition("@")[0]].caption is not None}
    ids = joined.samples(np.arange(len(joined)), ["id", CLIP_START])["id"].to_pylist()
    assert {*ids} == captioned


# Other sources.


def write_table(project: Project, kind: str) -> Path:
    """Write the name and caption of each good video, and where two clips of it begin."""
    rows = [
        {"video": name, "text": video.caption, "id": f"{name}#{start}", CLIP_START: start}
        for name, video in GOOD.items()
        for start in (0.0, 1 / 12)
    ]
    path = project.folder / f"list.{kind}"
    with path.open("w", newline="") as stream:
        if kind == "jsonl":
            stream.writelines(f"{json.dumps(each)}\n" for each in rows)
        else:
            table = csv.DictWriter(stream, rows[0])
            table.writeheader()
            table.writerows(rows)
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_table_may_say_itself_where_clips_begin(project, kind, probed):
    """And none of its videos is looked at before it is encoded. An empty field is no caption."""
    path = write_table(project, kind)
    source = {"kind": "table", "path": str(path), "images": str(project.source), "fields": {"extra": [CLIP_START]}}
    project.build(source=source, clip={"frames": FRAMES, "fps": FPS})
    assert not probed
    samples = samples_of(project.cache, "id", CLIP_START, "conversations")
    assert [each["id"] for each in samples] == [f"{name}#{at}" for name in GOOD for at in (0.0, 1 / 12)]
    for each in samples:
        name, _, start = each["id"].partition("#")
        assert each[CLIP_START] == float(start)
        assert caption_of(each["conversations"]) == (GOOD[name].caption or None)


@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("start", ["soon", "-1", "", "1e300", "NaN"])
def test_a_start_that_is_no_time_is_refused_before_planning(project, start, buckets):
    path = project.folder / "list.csv"
    path.write_text(f"video,id,{CLIP_START}\na.mp4,one,0\na.mp4,two,{start}\n")
    source = {"kind": "table", "path": str(path), "images": str(project.source), "fields": {"extra": [CLIP_START]}}
    project.settings |= {"image": {"buckets": BUCKETS}} if buckets else {}
    said = project.build(source=source, clip={"frames": FRAMES, "fps": FPS}, code=1)
    assert_names(said, f"source.fields.extra {CLIP_START} two seconds 360,000")
    assert len(said.splitlines()) == 1
    assert not project.cache.exists()


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_table_of_videos_is_cut_into_clips(built, kind):
    path = built.folder / f"list.{kind}"
    names = [*GOOD, *BROKEN]
    lines = ["path", *names] if kind == "csv" else [json.dumps({"path": name}) for name in names]
    path.write_text("\n".join(lines))
    built.build(name="table", source={"kind": "table", "path": str(path), "images": str(built.source)})
    starts = {each["id"]: each[CLIP_START] for each in samples_of(built.folder / "table", "id", CLIP_START)}
    assert starts == CLIPS
    assert rejects_of(built.folder / "table") == rejects_of(built.cache)


@pytest.mark.parametrize("kind", ["webdataset", "parquet"])
def test_tars_and_tables_hold_videos(built, kind):
    """Their latents are those of the folder."""
    data = {name.replace("/", "_").rpartition("."): (built.source / name).read_bytes() for name in GOOD}
    path = built.folder / f"shards/0.{'tar' if kind == 'webdataset' else 'parquet'}"
    path.parent.mkdir()
    if kind == "webdataset":
        parts = {stem: {suffix: each, "txt": f"Of {stem}."} for (stem, _, suffix), each in data.items()}
        write_tar(path, parts)
    else:
        columns = {"id": [stem for stem, *_ in data], "text": [f"Of {stem}." for stem, *_ in data]}
        columns["video"] = [{"bytes": each, "path": "".join(name)} for name, each in data.items()]
        pq.write_table(pa.table(columns), path, row_group_size=3)
    built.build(name="other", source={"kind": kind, "path": str(path.parent)})
    one, other = open_cache(built.cache), open_cache(built.folder / "other")
    found = [
        (each["id"], caption_of(each["conversations"]))
        for each in samples_of(built.folder / "other", "id", "conversations")
    ]
    stems = {name: name.replace("/", "_").rpartition(".")[0] for name in GOOD}
    expected = [(f"{stems[name]}@{first}", f"Of {stems[name]}.") for name in GOOD for first in GOOD[name].firsts]
    assert found == expected
    places = {f"{stems[name.partition('@')[0]]}@{name.partition('@')[2]}": at for at, name in enumerate(sorted(CLIPS))}
    same = one.read(np.array([places[name] for name, _ in found]))
    np.testing.assert_allclose(other.read(np.arange(len(other))), same, rtol=0, atol=1e-5)  # in other batches


# Clips of several sizes, and other stores.

BUCKETS = {"preset": "ours", "sizes": ["64x48", "48x64"]}


@pytest.fixture
def lengths(project: Project) -> Project:
    """Clips of 5 or 9 frames, as many as a video has, of two sizes."""
    project.settings |= {
        "image": {"buckets": BUCKETS},
        "clip": {"frames": [5, 9], "fps": FPS, "pick": "chunk"},
        "store__samples_per_shard": 3,
    }
    return project


def test_every_clip_is_in_the_array_of_its_frames_and_size(lengths):
    lengths.build()
    cache = open_cache(lengths.cache)
    model = AutoencoderKLWan.from_pretrained(lengths.vae, subfolder="vae")
    found = {}
    for number, sample in enumerate(samples_of(lengths.cache, "id", "uri", CLIP_START)):
        size, video = cache.array_of(np.array([number])).size, GOOD[sample["uri"]]
        (latent,) = cache.read(np.array([number]))
        found[sample["id"]] = size.name
        seen = seen_by_pyav(lengths.source / sample["uri"], sample[CLIP_START], video.rate, size.frames)
        with torch.inference_mode():
            pixels = torch.from_numpy(seen).permute(3, 0, 1, 2)[None] / 127.5 - 1
            (expected,) = model.encode(pixels).latent_dist.mode().numpy()
        np.testing.assert_allclose(latent, expected, rtol=0, atol=1e-5)
    expected = {}
    for name, video in GOOD.items():
        available = video.frames * FPS // video.rate
        length = 9 if available >= 9 else 5
        starts = range(0, available - length + 1, length)
        expected |= {f"{name}@{first}": f"{length}x64x48" for first in starts}
    assert found == expected
    assert {*rejects_of(lengths.cache)} == {f"{name}@0" for name in BROKEN}
    assert not verify(lengths.cache, "deep").findings


def test_clips_of_several_lengths_resume_grow_and_are_repaired(lengths):
    lengths.source = shutil.copytree(lengths.source, lengths.folder / "videos")
    lengths.settings["source"] = {"kind": "folder", "path": str(lengths.source)}
    lengths.build()
    for step in ("plan", "build --rank 0 --world-size 2", "build --rank 1 --world-size 2", "seal"):
        name, *options = step.split()
        lengths.run(main, name, "--config", lengths.config("ranks"), *options)
    assert timeless_files(lengths.folder / "ranks") == lengths.files()
    with lengths.same_in_the_end():
        flip(next(lengths.cache.glob("latents/*/c/0/0/0/0/0")))
        lengths.repair("--report", lengths.report())
    make_video(lengths.source / "wide.mp4", frames=20)
    make_video(lengths.source / "tall.mp4", frames=20, size=(48, 64))
    lengths.build("--extend")
    samples = samples_of(lengths.cache, "id")
    assert {"wide.mp4@0", "tall.mp4@0"} <= {each["id"] for each in samples}
    numbers = np.array([at for at, each in enumerate(samples) if each["id"] == "tall.mp4@0"])
    assert open_cache(lengths.cache).array_of(numbers).size.name == "9x48x64"
    assert "nothing to encode" in lengths.build()
    assert not verify(lengths.cache, "deep").findings
    assert "0 differ" in lengths.run(main, "audit", lengths.cache)


def test_codes_of_8_bits_are_off_by_half_a_step_of_each_clips_channel(built):
    built.build(name="codes", store__dtype="uint8")
    exact, codes = (open_cache(each).read(np.arange(len(CLIPS))) for each in (built.cache, built.folder / "codes"))
    step = np.ptp(exact, axis=(2, 3, 4), keepdims=True) / 255
    assert (np.abs(exact - codes) <= step / 2 + 1e-6).all()
    assert not verify(built.folder / "codes", "deep").findings


def test_tars_hold_the_latents_of_a_zarr_build(built):
    built.build(name="tars", store__format="webdataset")
    built.run(cache_store, "copy", built.cache, built.folder / "copied", "--format", "webdataset")
    assert timeless_files(built.folder / "copied") == timeless_files(built.folder / "tars")


# Refusals.

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"clip": {"frames": 6, "fps": 12}}, "clip.frames 4k 5 9"),
    ({"clip": {"fps": 12}}, "clip.fps clip.frames"),
    ({"clip": {"frames": 5}}, "clip.fps 16"),
    ({"image": {"height": 48, "width": 64, "decode": "reduced"}}, "image.decode clips"),
    ({"source": {"kind": "folder", "path": "nowhere"}}, "source.path nowhere"),
]


@pytest.mark.parametrize(("changes", "names"), REFUSED, ids=lambda each: each if isinstance(each, str) else "")
def test_a_config_that_cannot_be_is_refused_before_anything_is_written(project, changes, names):
    said = project.build(code=2, **changes)
    assert_names(said, names)
    assert len(said.splitlines()) == 1
    assert not project.cache.exists()


def test_other_clips_of_the_same_videos_are_another_cache(built):
    for clip in ({"frames": 9, "fps": FPS}, {"frames": FRAMES, "fps": 24}):
        with built.untouched():
            said = built.build(code=1, clip={**clip, "pick": "chunk"})
            assert_names(said, "clip --cache NEW")


def test_other_picks_of_the_same_videos_are_other_samples(built):
    with built.untouched():
        assert_names(built.build(code=1, clip={"frames": FRAMES, "fps": FPS, "pick": "head"}), "a.mp4@0")


def test_the_beginnings_of_videos_are_encoded_as_their_clips_were(built):
    cache = open_cache(built.cache)
    starts = [name for name in sorted(CLIPS) if name.endswith("@0")]
    latents = cache.read(np.array([sorted(CLIPS).index(name) for name in starts]))
    encoded = encode_images(cache, [built.source / name.partition("@")[0] for name in starts])
    np.testing.assert_allclose(np.stack(encoded), latents, rtol=0, atol=1e-5)


def test_images_of_a_cache_of_clips_are_no_images(built):
    """Its videos are rejected, each with its reason, unless clip: says that samples are clips."""
    source = {"kind": "cache", "path": str(built.cache)}
    said = built.build(name="images", source=source, clip={}, code=1)
    assert_names(said, "rejected decode")
