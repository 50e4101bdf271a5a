"""What holds for every kind of sample: equal bytes, mended damage, growth, withdrawal, joins and audits.

The other modules of this folder go deeper, with images.
"""

import json
import re
import shutil
import signal
from functools import partial

import numpy as np
import pytest
import zarr

from cache_store import open_cache, open_joined
from cache_store.cli import main as cache_store
from cache_store.verify.verify import verify
from precompute.cli import main
from precompute.encode_images import encode_images
from tests.cache_store.conftest import shard_name
from tests.cache_store.copy.test_withdraw import remains
from tests.families import first_and_slow
from tests.guarantees.kinds import KINDS, holding, ids_of, is_near, samples_of
from tests.guarantees.programs import Program, die_at
from tests.named import assert_names
from tests.places import Folder, Objects

# The same bytes.


def test_workers_ranks_and_killed_builds_write_the_same_bytes(sealed, forked_workers):
    sealed.build(name="workers", run__workers=2)
    sealed.in_ranks("ranks")
    config, deadly = str(sealed.config("killed")), f"deadly://{sealed.folder}/killed"
    for step in (6, 12):
        line = ["precompute", "build", "--config", config, "--cache", deadly]
        code, said = Program(line, sealed.folder, partial(die_at, step)).end()
        assert code == -signal.SIGKILL, said
    assert sealed.caches.below("killed").files(), "it was killed before it wrote anything"
    sealed.build(name="killed")
    for name in ("workers", "ranks", "killed"):
        assert sealed.caches.below(name).timeless() == sealed.files(), name


def test_a_cache_and_its_source_in_a_bucket_have_the_same_bytes(sealed, bucket, server, forked_workers):
    """By ranks with two workers each."""
    source, cache = (Objects(f"{bucket}/{name}", server.endpoint) for name in ("my source", "my cache"))
    source.mirror(Folder(sealed.source))
    sealed.in_ranks(source={**sealed.settings["source"], "path": source.address}, cache=cache.address, run__workers=2)
    differ = dict.fromkeys(("build.json", "plan/000000.parquet", "seal.json"), b"")  # places and dates of files
    assert cache.timeless() | differ == sealed.files() | differ
    assert open_cache(cache.address).identity == open_cache(sealed.cache).identity


@pytest.mark.parametrize("form", ["zip", "tar"])
def test_an_archive_gives_the_same_cache_as_a_folder(sealed, form):
    archive = shutil.make_archive(str(sealed.folder / "archived"), form, sealed.source)
    sealed.build(name="other", source={**sealed.settings["source"], "path": archive})
    assert open_cache(sealed.folder / "other").identity == open_cache(sealed.cache).identity


def test_tars_hold_what_zarr_holds(sealed):
    """Built or copied, and back; zarr reads each array."""
    tars, back = sealed.folder / "tars", sealed.folder / "back"
    sealed.build(name="tars", store__format="webdataset")
    sealed.run(cache_store, "copy", sealed.cache, sealed.folder / "copied", "--format", "webdataset")
    assert Folder(sealed.folder / "copied").timeless() == Folder(tars).timeless()
    sealed.run(cache_store, "copy", tars, back, "--format", "zarr")
    assert Folder(back).timeless() | {"build.json": b""} == sealed.files() | {"build.json": b""}
    assert not verify(tars, "deep").findings
    cache, group = open_cache(sealed.cache), zarr.open_group(sealed.cache, mode="r")
    for index, name in enumerate(cache.spec.names):
        numbers = np.flatnonzero(cache.array_indices(np.arange(len(cache))) == index)
        rows = np.asarray(group[f"latents/{name}"])
        stored = rows[np.isfinite(rows).reshape(len(rows), -1).all(1)]
        np.testing.assert_array_equal(stored, cache.read(numbers))
        np.testing.assert_array_equal(stored, open_cache(tars).read(numbers))


@holding("uint8")
def test_codes_of_8_bits_are_off_by_half_a_step_of_each_channel_and_grow_and_are_mended(sealed):
    sealed.own_files()
    sealed.build(name="exact", store__dtype="float32")
    sealed.settings["store__dtype"] = "uint8"
    sealed.cache = sealed.folder / "codes"
    sealed.build()
    exact, codes = samples_of(sealed.folder / "exact"), samples_of(sealed.cache)
    assert exact.keys() == codes.keys()
    for name, sample in exact.items():
        step = np.ptp(sample, axis=tuple(range(1, sample.ndim)), keepdims=True) / 255
        assert (np.abs(sample - codes[name]) <= step / 2 + 1e-6).all()
    with sealed.same_in_the_end():
        sealed.place.flip(shard_name(sealed.cache, 1))
        sealed.repair("--report", sealed.report())
    sealed.media.grow(sealed.source)
    sealed.build("--extend")
    assert not verify(sealed.cache, "deep").findings


# Damage.


@pytest.mark.parametrize(
    ("kind", "caches"),
    [*((kind, "folder") for kind in KINDS), *first_and_slow((kind, "bucket") for kind in KINDS)],
    indirect=True,
)
def test_a_flipped_bit_is_named_by_shard_and_row_and_repaired_to_the_same_bytes(sealed, sealed_once, kind, caches):
    """In a folder and in a bucket; the next build mends what is lost."""
    sealed.caches = caches
    sealed.place.mirror(sealed_once(kind))
    cache = open_cache(sealed.place.address)
    (sample,) = cache.samples(np.array([len(cache) - 1]), ["row", "offset"]).to_pylist()
    shard = cache.spec.shard_of_row(sample["row"])
    name = shard_name(sealed_once(kind).path, shard)
    with sealed.same_in_the_end():
        data = bytearray(sealed.place.read(name))
        data[sample["offset"]] ^= 1
        sealed.place.put(name, bytes(data))
        report = sealed.report()
        found = json.loads(report.read_text())["findings"]
        assert {(each["file"], each["shard"]) for each in found} == {(name, shard)}
        assert {each["row"] for each in found} - {None} == {sample["row"]}
        sealed.repair("--report", report)


@pytest.mark.parametrize(
    "lost", ["plan/000000.parquet", "zarr.json seal.json", "commits/000000.json data", "array table data"]
)
def test_a_repair_mends_lost_files_to_the_same_bytes(sealed, lost):
    files = {"data": shard_name(sealed.cache, 1), "table": "samples/000001.parquet"}
    files["array"] = f"latents/{open_cache(sealed.cache).spec.names[0]}/zarr.json"
    with sealed.same_in_the_end():
        sealed.lose(*(files.get(name, name) for name in lost.split()))
        sealed.repair()


# Changes.


def test_a_finished_build_has_nothing_to_do_is_told_and_audits_with_equal_bits(sealed, kind):
    cached = len(open_cache(sealed.cache))
    with sealed.untouched():
        assert "nothing to encode" in sealed.build()
        assert re.search("every encoded (image|text) is unchanged", sealed.build("--check-sources"))
        assert f"equal bits  {cached} of {cached}" in sealed.run(main, "audit", sealed.cache)
        sealed.run(cache_store, "gallery", sealed.cache, "--output", sealed.folder / "page.html")
        told = " ".join(sealed.run(cache_store, "info", sealed.cache).split())
    assert [each for each in (str(sealed.cache), *KINDS[kind].told) if each not in told] == []
    assert not verify(sealed.cache, "deep").findings


@holding("a file alone")
def test_a_file_is_encoded_alone_as_it_was_in_its_batch(sealed):
    """A sample of a video is its beginning."""
    samples = {name: each for name, each in samples_of(sealed.cache).items() if name.endswith((".png", "@0"))}
    encoded = encode_images(open_cache(sealed.cache), [sealed.source / name.partition("@")[0] for name in samples])
    assert is_near(samples, dict(zip(samples, encoded, strict=True)), 1e-3)


def test_new_files_are_appended_by_extend_alone(sealed):
    """Shards that stood are not touched; a packed copy has the same samples."""
    sealed.own_files()
    before, marks = samples_of(sealed.cache), sealed.place.marks()
    sealed.media.grow(sealed.source)
    with sealed.untouched():
        assert_names(sealed.build(code=1), f"--extend {sealed.media.grown}")
    sealed.build("--extend")
    kept = {name for name in marks if name.split("/")[0] in ("commits", "samples") or "/c/" in name}
    assert {name: marks[name] for name in kept} == {name: sealed.place.marks()[name] for name in kept}
    after = samples_of(sealed.cache)
    assert sealed.media.grown in after
    assert is_near(before, {name: after[name] for name in before})
    assert "nothing to encode" in sealed.build()
    assert not verify(sealed.cache, "deep").findings
    sealed.build(name="whole")
    assert is_near(after, samples_of(sealed.folder / "whole"), 1e-3), "but for rounding: batches have other samples"
    sealed.run(cache_store, "copy", sealed.cache, sealed.folder / "packed", "--reshard")
    assert is_near(after, samples_of(sealed.folder / "packed"))
    assert not verify(sealed.folder / "packed", "deep").findings


@holding("audit of a change")
def test_a_changed_file_is_named_by_builds_and_audits(sealed):
    sealed.own_files()
    sealed.media.change(sealed.source)
    with sealed.untouched():
        assert sealed.media.stays in sealed.build(code=1)
        assert sealed.media.stays in sealed.run(main, "audit", sealed.cache, code=1)


@holding("secret change")
def test_a_change_that_no_date_tells_is_found_by_check_sources_alone(sealed):
    sealed.own_files()
    for code in (1, 0):
        sealed.flip_in_secret(sealed.media.stays)
        assert "nothing to encode" in sealed.build()
        said = sealed.build("--check-sources", code=code)
        assert (sealed.media.stays in said) is bool(code)


@holding("retry")
def test_a_mended_file_is_cached_by_a_retry_as_in_a_new_build(sealed, kind):
    """With several sizes, but for rounding: a new build knows the size of the mended file, and has another order."""
    sealed.own_files()
    with sealed.untouched():
        assert "recovered 0 of 1 " in sealed.build("--retry-rejected")
        sealed.media.mend(sealed.source)
        assert_names(sealed.build(), f"--retry-rejected {sealed.media.rejected}")
    before = sealed.place.marks()
    assert "recovered 1 of 1 " in sealed.build("--retry-rejected")
    after = sealed.place.marks()
    assert sum(after[name] != mark for name, mark in before.items() if name.startswith("commits/")) == 1
    sealed.build(name="fresh")
    fresh = sealed.folder / "fresh"
    assert open_cache(sealed.cache).identity == open_cache(fresh).identity or "sizes" in kind
    assert is_near(samples_of(sealed.cache), samples_of(fresh), 1e-3)


REFUSED = {
    "uint8": (2, "build --store.dtype uint8", "uint8 float16"),
    "secret change": (0, "build", "precompute captions"),
    "audit of a change": (0, "build --check-sources", "precompute captions"),
    "retry": (0, "build --retry-rejected", "precompute captions"),
}
"""A kind that does not hold a claim says so: an exit code, a command, and words."""


@pytest.mark.parametrize(
    ("kind", "claim"), [(name, claim) for name, kind in KINDS.items() for claim in kind.refuses if claim in REFUSED]
)
def test_what_a_kind_refuses_is_said_before_anything_is_written(sealed, claim):
    code, command, names = REFUSED[claim]
    sealed.own_files()
    {"uint8": lambda _: None, "retry": sealed.media.mend}.get(claim, sealed.media.change)(sealed.source)
    with sealed.untouched():
        said = sealed.do(command, code=code)
    assert_names(said, names)


# Withdrawal.


def test_a_withdrawn_sample_is_in_no_file_and_no_build_brings_it_back(sealed):
    """One is still in the source, one is gone, one was rejected."""
    sealed.own_files()
    media, cache = sealed.media, open_cache(sealed.cache)
    ids, columns = ids_of(sealed.cache), ["row", "offset", "length", "content_sha256"]
    (sample,) = cache.samples(np.array([ids.index(media.gone)]), columns).to_pylist()
    shard = shard_name(sealed.cache, cache.spec.shard_of_row(sample["row"]))
    traces = {"sample": sealed.place.read(shard)[sample["offset"] :][: sample["length"]]}
    traces |= {"digest": sample["content_sha256"].encode(), "text": f"Of {media.gone.partition('.')[0]}.".encode()}
    assert {what for _, what in remains(sealed.place.files(), traces)} == {*traces}
    (sealed.folder / "ids.txt").write_text("\n".join([media.stays, media.gone, media.rejected]))
    sealed.run(cache_store, "withdraw", sealed.cache, "--ids", sealed.folder / "ids.txt")
    for path in [*sealed.source.glob(f"{media.gone.partition('.')[0]}.*")]:
        path.unlink()
    media.mend(sealed.source)
    left = [name for name in ids if name not in (media.stays, media.gone)]
    with sealed.same_in_the_end():
        for flag in ("--extend", "--retry-rejected", "--check-sources"):
            sealed.build(flag)
        sealed.lose(*{shard, "commits/000000.json"})
        sealed.repair("--shards", "[0,1,2]")
        sealed.lose("seal.json", "commits/000001.json")
        sealed.in_ranks()
    media.grow(sealed.source)
    sealed.build("--extend")
    assert {*ids_of(sealed.cache)} >= {*left, media.grown}
    assert not {*ids_of(sealed.cache)} & {media.stays, media.gone, media.rejected}
    assert not remains(sealed.place.files(), traces)
    assert not verify(sealed.cache, "deep").findings


# Caches of the same samples.


def test_another_cache_over_the_same_samples_joins_row_by_row(sealed, kind):
    """A cache with the same encoder is as built from the files."""
    source = {"kind": "cache", "path": str(sealed.cache)}
    sealed.build(name="again", source={**sealed.settings["source"], **source})
    assert open_cache(sealed.folder / "again").identity == open_cache(sealed.cache).identity
    other = KINDS[kind].other
    sealed.settings = sealed.settings_of(other, source)
    sealed.build(name="other")
    joined = open_joined({"one": sealed.cache, "other": sealed.folder / "other"})
    one, two = samples_of(sealed.cache), samples_of(sealed.folder / "other")
    numbers = np.arange(len(joined))
    names = joined.samples(numbers, ["id"])["id"].to_pylist()
    assert {*names} == one.keys() & two.keys()
    assert len(names) > 3
    for number, name in zip(numbers, names, strict=True):
        read = joined.read(np.array([number]))
        assert (read["one"][0] == one[name]).all()
        assert (read["other"][0] == two[name]).all()
