"""Damage of every kind is named in every form, and sound files are not.

One edit cannot be found: that of a shard's circumstances (`run` in its record) with a new signature, since clocks and
hosts enter no digest.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache_store.verify.verify import verify
from tests.cache_store import signing
from tests.cache_store.verify.damage import LEVELS, files_in, make_sound, named, shard_files


@pytest.fixture(scope="module")
def sound(form: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sound(tmp_path_factory.mktemp("sound"), *form)


@pytest.fixture
def cache(sound: Path, tmp_path: Path) -> Path:
    (tmp_path / "other").symlink_to(sound.parent / "other")
    return Path(shutil.copytree(sound, tmp_path / "cache"))


# Any byte of any file, any size, and what is no file.


WRONG: dict[str, Callable[[Path, bytes], object]] = {
    "gone": lambda path, data: None,
    "cut by one": lambda path, data: path.write_bytes(data[:-1]),
    "emptied": lambda path, data: path.write_bytes(b""),
    "longer by zeros": lambda path, data: path.write_bytes(data + bytes(10_240)),
    "a folder": lambda path, data: (path / "inner").mkdir(parents=True),
    "a pipe": lambda path, data: os.mkfifo(path),
    "a link to itself": lambda path, data: path.symlink_to(path),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_gone_resized_or_replaced_is_named_at_every_level(cache, what):
    """Verification does not wait for a pipe."""
    for number, name in enumerate(files_in(cache)):
        kept = (cache / name).rename(cache.parent / "kept")
        WRONG[what](cache / name, kept.read_bytes())
        for level in LEVELS:
            report = verify(cache, level)
            assert name in named(report.findings), level
            if what.startswith("a "):
                assert next(report.next_steps("report.json")).startswith(f"move {cache}/{name} away")
        if os.path.lexists(cache / name):
            (cache / name).rename(cache.parent / f"moved {number}")
        kept.rename(cache / name)
    assert not verify(cache, "full").findings


# Records edited by hand, with and without a digest of their own made anew.

RECORD_EDITS: list[dict[str, Any]] = [
    *({field: "0" * 64} for field in ("samples", "rows_digest", "files.1.sha256", "sums")),
    {"sums": None},
    *({field: 7} for field in ("recipe.array.image.max_pixels", "files.0.bytes")),
    *({"shard": 0}, {"files.0.path": "../x"}, {"files": []}, {"reasons": {"too large": 1}}, {"non_finite": 3}),
    *({"remarks": {"odd, so what": 1}}, {"cut_texts": 1}),
    {"cached": 6, "rejected": 0, "reasons": {}},
    {"cached": -1, "rejected": 7, "reasons": {"missing": 7}},
]
SEAL_EDITS: list[dict[str, Any]] = [
    *({f"array.{field}.0": lambda value: value + 1e-3} for field in ("mean", "maximum", "preview.bias")),
    *({"planned": 99}, {"reasons": {}}, {"plan_files.0.path": "build.json"}, {"array.bytes": 1}),
    *({"cached": lambda count: count + 1, "rejected": lambda count: count - 1}, {"remarks": {"odd, so what": 1}}),
]
UNSEEN = {"non_finite", "remarks"}
STATISTICS = {f"array.{name}" for name in ("mean.0", "maximum.0", "preview.bias.0")}
EDITS = [("record 1", edits) for edits in RECORD_EDITS] + [("seal.json", edits) for edits in SEAL_EDITS]


@pytest.mark.parametrize(("what", "edits"), EDITS, ids=lambda value: "-".join(value) if isinstance(value, dict) else "")
@pytest.mark.parametrize("sign", [signing.save_signed, signing.save])
def test_an_edited_record_is_named_with_or_without_a_new_digest(cache, what, edits, sign):
    name = shard_files(cache).get(what, what)
    record = signing.load(cache / name)
    for field, value in edits.items():
        signing.set_field(record.get("content", record), field, value)
    sign(cache / name, record)
    is_unread = sign is signing.save_signed and edits.keys() <= STATISTICS  # at level quick, no table is opened
    for level in LEVELS[is_unread:]:
        findings = verify(cache, level).findings
        assert name in named(findings)
        assert {finding.shard for finding in findings} == {1 if what == "record 1" else None}
    if what == "record 1" and sign is signing.save_signed:
        (cache / "seal.json").unlink()
        found = any(finding.shard == 1 for finding in verify(cache, "deep").findings)
        assert found != (edits.keys() <= UNSEEN), "without a seal only these go unseen"
