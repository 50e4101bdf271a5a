"""Sources at URLs give the plan, identity and bytes of the same tars, tables, lists and trees on disk."""

import json
import os
import re
import signal
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cache.metadata import open_plan, read_build, read_seal
from cache_store.storage import objects
from cache_store.storage.local import LocalStore
from cache_store.storage.store import open_store
from precompute.cli import main
from precompute.source_images import open_source_images
from precompute.sources.config import SourceConfig
from precompute.sources.opening import open_source
from tests.guarantees.programs import Program
from tests.object_stores.server import OTHERS
from tests.places import Objects
from tests.precompute.conftest import GOOD, Project, image_bytes, make_vae, sample_name, timeless_files
from tests.precompute.sources.pictures import numbered, write_dataset, write_tar
from tests.precompute.sources.test_archives import make_tar


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return make_vae(tmp_path_factory.mktemp("vae"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for place, numbers in enumerate(((9, 1, 2), (3, 4, 5, 6, 7))):
        write_tar(folder / f"tars/{place:05d}.tar", numbered(*numbers))
        write_dataset(folder / f"data/train-{place}.parquet", *numbers)
    files = {f"{sample_name(number)}.png": image_bytes(number) for number in GOOD[:8]}
    (folder / "images").mkdir()
    for name, data in files.items():
        (folder / "images" / name).write_bytes(data)
        (folder / "images" / name).with_suffix(".txt").write_text(f"Picture {name}.")
    with zipfile.ZipFile(folder / "images.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    make_tar(folder / "images.tar", files.items())
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "A picture."}]
    records = [{"id": name, "image": name, "conversations": turns} for name in files]
    (folder / "images/chat.json").write_text(json.dumps(records))
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


def upload(folder: Path, url: str) -> None:
    store = open_store(url)
    for path in folder.rglob("*"):
        if path.is_file():
            store.put_whole(path.relative_to(folder).as_posix(), path.read_bytes())


@pytest.fixture
def project(pictures, vae, bucket, tmp_path, capsys):
    upload(pictures, f"{bucket}/in")
    project = Project(tmp_path, vae, capsys)
    project.settings = {"store__samples_per_shard": 3}
    return project


SOURCES = {
    "a folder of tars": ("webdataset", "tars", None),
    "tars by number": ("webdataset", "tars/{00000..00001}.tar", None),
    "tables by pattern": ("parquet", "data/train-*.parquet", None),
    "a table": ("parquet", "data/train-0.parquet", None),
    "a list beside its images": ("llava", "images/chat.json", None),
    "lines, images in a folder": ("llava", "chat.jsonl", "images"),
    "lines, images in a zip": ("llava", "chat.jsonl", "images.zip"),
    "lines, images in a tar": ("llava", "chat.jsonl", "images.tar"),
    "a tree": ("folder", "images", None),
}


def source_of(name: str, root: str) -> dict[str, str]:
    kind, path, images = SOURCES[name]
    return {"kind": kind, "path": f"{root}/{path}"} | ({"images": f"{root}/{images}"} if images else {})


ELSEWHERE = [(scheme, name) for scheme in OTHERS for name in ("a folder of tars", "lines, images in a folder")]


@pytest.mark.parametrize(("scheme", "name"), [*(("s3", name) for name in SOURCES), *ELSEWHERE])
def test_sources_at_urls_give_the_bytes_of_those_on_disk(project, pictures, bucket, name):
    image = {"buckets": {"preset": "ours", "resolution": 32, "step": 8}}
    for cache, root in (("here", str(pictures)), ("there", f"{bucket}/in")):
        project.build(name=cache, source=source_of(name, root), image=image)
    here, there = (project.folder / cache for cache in ("here", "there"))
    assert sealed(here) == sealed(there)
    assert images_of(here) == images_of(there)
    assert "nothing to encode" in project.build(name="there", source=source_of(name, f"{bucket}/in"), image=image)
    kind, _, images = SOURCES[name]
    is_without_loose_images = kind in ("webdataset", "parquet") or images in ("images.zip", "images.tar")
    assert (read_build(LocalStore(there)).listed.source is not None) == is_without_loose_images


WRONG = [
    ("llava", "s3://no-such-bucket/a.jsonl", 1, "'no-such-bucket'"),
    ("webdataset", "BUCKET/in/tars/{00000..00002}.tar", 2, "00002.tar"),
    ("parquet", "BUCKET/in/data/test-*.parquet", 2, r"test-\*.parquet"),
    ("llava", "BUCKET/in/list.json", 2, "source.path: .*in/list.json"),
    ("folder", "BUCKET/in/photos", 2, "source.path: .*in/photos"),
    ("webdataset", "http://host/a.tar", 2, "s3://, gs://, az://, hf://"),
    ("webdataset", "BUCKET/in/images.zip", 1, "images.zip"),
]


@pytest.mark.parametrize(("kind", "path", "code", "named"), WRONG)
def test_what_is_wrong_with_a_url_is_one_line(project, bucket, kind, path, code, named):
    said = project.build(source={"kind": kind, "path": path.replace("BUCKET", bucket)}, code=code)
    assert re.search(f"^precompute: error: .*{named}", said)
    assert said.count("\n") == 1
    assert not project.cache.exists()


@pytest.mark.parametrize("name", ["tars by number", "a table", "lines, images in a folder", "lines, images in a zip"])
def test_a_store_that_fails_stops_the_build_and_a_rerun_goes_on(project, bucket, proxy, name, monkeypatch):
    """Whichever request fails, no image is rejected."""
    source = source_of(name, f"{bucket}/in")
    project.build(name="other", source=source)
    reads = sum(request.method == "GET" and "/in/" in request.path for request in proxy.requests)
    monkeypatch.setattr("cache_store.storage.retry.ATTEMPTS", 1)
    monkeypatch.setattr("cache_store.storage.retry.PATIENCE_S", 0)
    for first in sorted({1, 2, reads // 4, reads // 2}):  # a rerun needs fewer: it has the plan
        proxy.fail("500", "GET", "/in/", first=first, times=10**6)
        said = project.build(source=source, code=1)
        assert re.search("precompute: error: .*500", said.splitlines()[-1])
        proxy.mend()
    project.build(source=source)
    assert images_of(project.cache) == images_of(project.folder / "other")


def test_what_changes_at_a_url_is_found_as_on_disk(project, pictures, bucket):
    """A tar gets other images, or is only written again; an image disappears and returns."""
    tars, store = source_of("tars by number", f"{bucket}/in"), open_store(f"{bucket}/in")
    project.build(source=tars)
    sound = store.read("tars/00001.tar")
    store.put_whole("tars/00001.tar", sound)
    assert "nothing to encode" in project.build(source=tars)
    other = write_tar(project.folder / "other.tar", numbered(3, 4, 5, 6, 7) | {"000000007": {"png": image_bytes(8)}})
    store.put_whole("tars/00001.tar", other.read_bytes())
    assert "000000007" in project.build(source=tars, code=1)
    tree = {"kind": "llava", "path": f"{bucket}/in/chat.jsonl", "images": f"{bucket}/in/images"}
    gone = f"images/{sample_name(2)}.png"
    data = store.read(gone)
    store.delete(gone)
    assert "1 rejected (1 missing)" in project.build(name="tree", source=tree)
    store.put_whole(gone, data)
    assert "recovered 1 of 1" in project.build("--retry-rejected", name="tree", source=tree)


def wait_briefly_for_an_answer() -> None:
    objects.ANSWER_S = 2


@pytest.mark.parametrize("part", ["list-type", ".png"])
def test_a_stop_waits_for_one_answer_of_a_store_that_is_silent(project, bucket, proxy, part):
    """While images are listed, and while they are encoded."""
    config = project.config(source=source_of("a tree", f"{bucket}/in"), run__workers=1)
    asked = threading.Event()
    proxy.fail("hang", "GET", part, times=10**6, also=asked.set)
    build = Program(["precompute", "build", "--config", str(config)], project.folder, wait_briefly_for_an_answer)
    assert asked.wait(60)
    os.kill(build.process.pid, signal.SIGINT)
    code, said = build.end()
    assert code == 3, said
    assert "Traceback" not in said


def test_a_cache_at_a_url_is_built_on_audited_and_shown(project, bucket):
    """Its images are at a URL too; a second cache is planned from the first."""
    first, second = (f"{bucket}/caches/{name}" for name in ("first", "second"))
    config = project.config(source=source_of("tars by number", f"{bucket}/in"))
    project.run(main, "build", "--config", config, "--cache", first)
    config = project.config(source={"kind": "cache", "path": first}, image__height=16)
    project.run(main, "build", "--config", config, "--cache", second)
    plans = [open_plan(open_store(each)) for each in (first, second)]
    assert plans[0].part(0).computed_digests().part.digest == plans[1].part(0).computed_digests().part.digest
    assert "equal bits  8 of 8" in project.run(main, "audit", second, "--samples", 8)
    cache = open_cache(second)
    (shown,) = cache.samples(np.array([2]), ["uri", "place"]).to_pylist()
    frames_TYX3, _ = open_source_images(second)(shown, cache.arrays[0])
    assert frames_TYX3.shape == (1, 16, 40, 3)


def test_what_a_name_is_made_of_is_no_part_of_a_url(bucket, server, pictures):
    """A name may contain `#` or `%20`; a folder or a file that has a pattern's exact name is used."""
    folder = "my #1 photos 100%20 é [x]{a,b}*?"
    Objects(bucket, server.endpoint).put(f"{folder}/00000.tar", (pictures / "tars/00000.tar").read_bytes())
    for path in (folder, f"{folder}/00000.tar"):
        source = open_source(SourceConfig(kind="webdataset", path=f"{bucket}/{path}"))
        assert len([*source.samples()]) == 3


def test_a_plan_of_tars_costs_a_few_requests_and_no_images(bucket, proxy, tmp_path):
    """Large images are skipped; the texts of all samples are read together."""
    samples = {f"{number:02d}": {"jpg": bytes(400_000), "txt": f"Picture {number}."} for number in range(20)}
    upload(write_tar(tmp_path / "tars/a.tar", samples).parent, bucket)
    source = open_source(SourceConfig(kind="webdataset", path=f"{bucket}/a.tar"))
    assert len([*source.samples()]) == len(samples)
    assert sum(request.sent for request in proxy.requests if request.method == "GET") < 20 * 400_000
    assert sum(request.method == "GET" for request in proxy.requests) < 50


def sealed(cache: Path) -> tuple[str, str]:
    seal = read_seal(LocalStore(cache))
    return seal.identity, seal.spec.digest


def images_of(cache: Path) -> dict[str, bytes]:
    """Return all files except those with the source's address or its files' times."""
    other = ("build.json", "plan/000000.parquet", "seal.json")
    return {name: data for name, data in timeless_files(cache).items() if name not in other}
