"""Damage is named by file, shard and row in every place, and sound files are not named."""

import shutil
from functools import cache

import numpy as np
import pytest

from cache_store.errors import NewerFormatError
from cache_store.verify.findings import Finding
from cache_store.verify.verify import verify
from tests.cache_store.conftest import shard_name
from tests.cache_store.verify.damage import (
    LEVELS,
    SCENES,
    SHARDS,
    files_in,
    harm,
    make_sound,
    named,
    rows_at,
    shard_files,
)
from tests.places import Folder

ZARR, BLOSC, TARS = ("zarr", "none"), ("zarr", "zstd"), ("webdataset", "none")
WHERE = [("folder", ZARR, 200), ("folder", BLOSC, 200), ("folder", TARS, 200), ("bucket", ZARR, 30)]
"""Place, form, and number of flipped bits."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return cache(lambda form: make_sound(tmp_path_factory.mktemp("sound"), *form))


@pytest.mark.parametrize(("caches", "form", "flips"), WHERE, indirect=["caches"])
def test_any_flipped_bit_is_named_by_its_file_and_row_alone(sound, caches, form, flips):
    caches.mirror(Folder(sound(form)))
    rng, files = np.random.default_rng(1), files_in(sound(form))
    spans = {shard_name(sound(form), shard): rows_at(sound(form), shard) for shard in SHARDS}
    for name in [*files] * (flips // len(files)):
        data = caches.read(name)
        position, bit = int(rng.integers(len(data))), int(rng.integers(8))
        caches.put(name, data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :])
        try:
            findings = verify(caches.address, "full").findings
        except NewerFormatError as error:  # the whole cache is refused in one line
            findings = (Finding(file=str(error).partition(" has ")[0].rpartition("/")[2], problem=str(error)),)
        caches.put(name, data)
        where = f"{name}: bit {bit} of byte {position}: {findings}"
        assert {(finding.file, finding.shard) for finding in findings} == {(name, files[name])}, where
        assert {row for span, row in spans.get(name, ()) if position in span} <= named(findings)[name], where
    assert not verify(caches.address, "full").findings


@pytest.mark.parametrize(("caches", "form"), [each[:2] for each in WHERE], indirect=["caches"])
@pytest.mark.parametrize("name", SCENES)
def test_damage_is_named_by_file_and_row_and_nothing_else_is(sound, caches, tmp_path, form, name):
    copy = shutil.copytree(sound(form), tmp_path / "copy")
    (tmp_path / "other").symlink_to(sound(form).parent / "other")
    scene, names, shards = SCENES[name], shard_files(copy), files_in(copy)
    harm(copy, name)
    caches.mirror(Folder(copy))
    full = scene.deep if scene.full is None else scene.full
    for level, expected in zip(LEVELS, (scene.quick, full, scene.deep), strict=True):
        findings = verify(caches.address, level).findings
        if expected is not None:
            assert named(findings) == {names.get(name, name): rows for name, rows in expected.items()}, level
        assert all(finding.shard == shards[finding.file] for finding in findings)
    assert scene.says in "\n".join(finding.problem for finding in findings)
