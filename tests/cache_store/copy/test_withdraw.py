"""`cache-store withdraw`: no byte of a withdrawn sample is left in any file, also after a kill at any step."""

import io
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from cache_store import open_cache, open_joined
from cache_store.cache.metadata import (
    open_plan,
    read_build,
    read_commit,
    read_samples,
    read_spec,
    read_sums,
    write_build,
)
from cache_store.cli import main
from cache_store.copy.withdraw import withdraw
from cache_store.errors import StaleError
from cache_store.format.layout import samples_file
from cache_store.format.plan import is_withdrawn
from cache_store.format.sums import ShardSums
from cache_store.format.tables import SAMPLES_SCHEMA, TOKENS
from cache_store.storage.local import LocalStore
from cache_store.storage.protocol import Data
from cache_store.verify.verify import verify
from tests.cache_store.conftest import REJECTED, ROWS, contents, flip, samples_of, shard_name
from tests.families import first_and_slow
from tests.make_cache import caption, make_cache, text_recipe
from tests.memory_store import MemoryStore
from tests.places import Folder

IDS = [f"sample-{row:06d}" for row in range(ROWS)]
CAPTIONS = [f"a caption that only row {row} has, {'very ' * row}long" for row in range(ROWS)]
GONE = [3, 5, 6, 20]
"""Rows to withdraw; the first was rejected, and shards 1 and 3 have none of them."""
KEPT = [row for row in range(ROWS) if row not in {*GONE, *REJECTED}]


def written(ids: Path, rows: list[int]) -> str:
    ids.write_text("".join(f"{IDS[row]}\n" for row in rows))
    return str(ids)


@pytest.fixture
def gone(tmp_path: Path) -> str:
    return written(tmp_path / "ids.txt", GONE)


@pytest.fixture
def make(tmp_path: Path, latents: np.ndarray) -> Callable[..., Path]:
    """Makes a cache whose samples have captions and scores of their own."""

    def made(name: str = "cache", **options: Any) -> Path:
        values = {"latents": latents, "rejected": REJECTED, **options}
        texts = [caption(text) for text in CAPTIONS]
        extra = {"mood": [f"the mood of {row}" for row in range(ROWS)]}
        return make_cache(tmp_path / name, values.pop("latents"), IDS, texts, extra=extra, **values)

    return made


SIZES = [samples_of((4, 6, 5), 14), samples_of((4, 5, 6), 16, seed=8)]
CLIPS = [samples_of((4, 5, 2, 3), 14), samples_of((4, 9, 2, 3), 16, seed=8)]
FORMS: dict[str, dict[str, Any]] = {
    "zstd": {"codec": "zstd", "dtype": "bfloat16"},
    "uint8": {"dtype": "uint8"},
    "sizes in tars": {"latents": SIZES, "store_format": "webdataset"},
    "clips in tars": {"latents": CLIPS, "clips": True, "store_format": "webdataset"},
    "texts": {"latents": samples_of((5, 8), seed=9), "text": text_recipe(5)},
}


def sums(cache: Path) -> ShardSums:
    return read_sums(LocalStore(cache), read_spec(cache), read_commit(cache, 0).content)


def traces_of(cache: Path, rows: list[int]) -> dict[str, bytes]:
    """Return bytes that no file may have after these rows are withdrawn: of latents, texts and digests."""
    opened, found = open_cache(cache), dict[str, bytes]()
    numbers = {int(row): number for number, row in enumerate(opened.samples(np.arange(len(opened)))["row"].to_pylist())}
    for row in rows:
        found |= {f"caption of {row}": CAPTIONS[row].encode(), f"mood of {row}": f"the mood of {row}".encode()}
        if row in numbers:
            columns = ["content_sha256", "offset", "length"]
            (sample,) = opened.samples(np.array([numbers[row]]), columns).to_pylist()
            file = cache / shard_name(cache, opened.spec.shard_of_row(row))
            data = file.read_bytes()[sample["offset"] : sample["offset"] + sample["length"]]
            assert len(data) > 40
            found |= {f"latent of {row}": data, f"digest of {row}": sample["content_sha256"].encode()}
    return found


def remains(files: dict[str, bytes], traces: dict[str, bytes]) -> list[tuple[str, str]]:
    """List the files that have a trace, and which; tables are searched as they are, and decompressed."""
    found = []
    for name, data in files.items():
        rows = pq.read_table(io.BytesIO(data)).to_pylist() if name.endswith(".parquet") else []
        text = data + "\n".join(map(repr, rows)).encode()
        found += [(name, what) for what, trace in traces.items() if trace in text]
    return found


@pytest.mark.parametrize("form", FORMS)
def test_no_byte_of_a_withdrawn_sample_is_left_in_any_file(make, gone, form, capsys):
    """The others keep their bytes and rows, and files of other shards stay as they are."""
    cache = make(**FORMS[form])
    traces = traces_of(cache, GONE)
    for name in ("plan/000000.parquet", samples_file(0)):  # what dead builds left may hold the sample too
        path = cache / name
        path.with_name(f".{path.name}.7.partial").write_bytes(path.read_bytes())
    before, opened = contents(cache), open_cache(cache)
    numbers = np.flatnonzero(~np.isin(opened.samples(np.arange(len(opened)))["row"].to_numpy(), GONE))
    kept = [opened.read(np.array([number]))[0] for number in numbers]
    null_text = opened.null_text() if "texts" in form else None
    assert {what for _, what in remains(before, traces)} == {*traces}
    assert main(["withdraw", str(cache), "--ids", gone]) == 0
    now, after = open_cache(cache), contents(cache)
    said = capsys.readouterr().out
    assert "withdrawn 4 samples, rewritten 2 shards" in said
    assert f"cache identity {now.identity}" in said
    assert now.identity != opened.identity
    assert not remains(after, traces)
    assert verify(cache, "deep").findings == ()
    assert now.samples(np.arange(len(now)), ["row"])["row"].to_pylist() == KEPT
    for number, sample in enumerate(kept):
        np.testing.assert_array_equal(now.read(np.array([number]))[0], sample)
    assert now.seal.reasons == {"withdrawn": 4, "missing": 2}
    for shard in (shard for shard in range(now.spec.num_shards) if not {*GONE} & {*now.spec.shard_rows(shard)}):
        for name in (shard_name(cache, shard), samples_file(shard), f"commits/{shard:06d}.json"):
            assert after[name] == before[name]
    assert (now.seal.array.preview is not None) == opened.spec.array.has_preview
    if null_text is not None:
        np.testing.assert_array_equal(now.null_text(), null_text)


def test_what_stays_of_a_row_are_its_number_id_uri_and_size(make, gone):
    cache = make()
    assert main(["withdraw", str(cache), "--ids", gone]) == 0
    plan = open_plan(cache)
    rows = plan.part_rows(0)
    assert np.flatnonzero(is_withdrawn(rows)).tolist() == GONE
    others = dict.fromkeys(("clip_start", "conversations", "fingerprint", "place", "mood"))
    left = {"id": IDS[5], "uri": f"{IDS[5]}.png", "state": "withdrawn", "size": "40x48"}
    assert rows.slice(5, 1).to_pylist() == [left | others]
    (row,) = read_samples(cache, 0).slice(5, 1).to_pylist()
    assert {name: value for name, value in row.items() if value is not None} == {
        "row": 5,
        "id": IDS[5],
        "status": "rejected",
        "reason": "withdrawn",
    }
    content = read_commit(cache, 0).content
    assert content.reasons == {"withdrawn": 3}
    assert sums(cache).preview is None


def test_a_second_run_changes_nothing(make, gone, tmp_path, capsys):
    cache = make()
    assert main(["withdraw", str(cache), "--ids", gone]) == 0
    place = Folder(cache)
    with place.untouched():
        assert main(["withdraw", str(cache), "--ids", gone]) == 0
    assert "4 samples withdrawn already" in capsys.readouterr().out
    assert main(["withdraw", str(cache), "--ids", written(tmp_path / "more.txt", [*GONE, 7])]) == 0
    assert "withdrawn 5 samples, rewritten 1 shard" in capsys.readouterr().out
    assert open_cache(cache).seal.reasons["withdrawn"] == 5


def test_every_cache_of_the_plan_is_done_by_one_command_and_still_joins(make, gone):
    world, text = make("world"), make("text", **FORMS["texts"], samples_per_shard=10)
    other = make("other", latents=samples_of((4, 8)), rejected=[1])
    assert main(["withdraw", str(world), str(text), "--ids", gone]) == 0
    joined = open_joined({"world": world, "text": text})
    assert joined.samples(np.arange(len(joined)), ["row"])["row"].to_pylist() == KEPT
    with pytest.raises(StaleError, match=f"withdrawn rows .*(.|\n)*withdraw {world} {other} --ids FILE"):
        open_joined({"world": world, "other": other})


def test_a_shard_without_a_sample_has_no_statistics(make, tmp_path):
    cache = make()
    assert main(["withdraw", str(cache), "--ids", written(tmp_path / "all.txt", [*range(8, 16)])]) == 0
    content = read_commit(cache, 1).content
    assert (content.cached, content.sums) == (0, None)
    assert verify(cache, "deep").findings == ()
    assert main(["withdraw", str(cache), "--ids", written(tmp_path / "every.txt", [0, 16, 24])]) == 0
    assert open_cache(cache).seal.array.preview is None
    assert verify(cache, "deep").findings == ()


def test_what_cannot_be_withdrawn_is_refused_and_touches_nothing(make, gone, tmp_path, capsys):
    sound, unsealed, twice, damaged = make("sound"), make("unsealed", seal=False), tmp_path / "twice", make("damaged")
    make_cache(twice, samples_of((4, 6, 5)), [*IDS[:-1], IDS[5]])
    flip(damaged / shard_name(damaged, 2), 3)
    lists = {"unknown": [IDS[1], "nobody", "me"], "all": IDS, "empty": []}
    for name, ids in lists.items():
        (tmp_path / name).write_text("\n".join(ids))
    for caches, ids, code, named in (
        ([sound], tmp_path / "unknown", 2, "does not have 2 ids: nobody, me"),
        ([sound], tmp_path / "all", 1, "would have no sample left"),
        ([sound], tmp_path / "empty", 2, "holds no id"),
        ([sound], tmp_path / "nothing.txt", 2, "nothing.txt: No such file"),
        ([tmp_path / "nowhere"], gone, 2, "nowhere"),
        ([sound, unsealed], gone, 1, "is not sealed"),
        ([sound, twice], gone, 1, f"1 id more than once: {IDS[5]}"),
        ([sound, damaged], gone, 1, "shard 2"),
    ):
        before = contents(tmp_path)
        assert main(["withdraw", *map(str, caches), "--ids", str(ids)]) == code
        assert named in capsys.readouterr().err
        assert contents(tmp_path) == before


def test_verify_names_what_is_left_of_a_withdrawn_row(tmp_path):
    """A shard is not believed though every digest is right."""
    cache = make_cache(tmp_path / "cache", samples_of((4, 6, 5)), IDS, withdrawn=[5])
    problems = {(each.row, each.file, each.problem) for each in verify(cache, "deep").findings}
    (texts,) = (path.relative_to(cache).as_posix() for path in cache.glob("texts/*"))
    table, held = samples_file(0), {*SAMPLES_SCHEMA.names} - {"row", "id", "status", "reason", TOKENS}
    assert problems == {
        (5, table, "is not withdrawn, the plan says otherwise"),
        *((5, table, f"is withdrawn, but its {name} is still there") for name in held),
        (5, "plan/000000.parquet", "is withdrawn, but its fingerprint is still there"),
        (5, texts, "is withdrawn, but its conversations is still there"),
    }


class KilledError(BaseException):
    """The program dies here: nothing catches it."""


@dataclass(frozen=True)
class DyingStore(MemoryStore):
    """A store whose program dies before or after its n-th write or deletion; it lives on with 0."""

    dies_at: int = 0
    steps: Iterator[int] = field(default_factory=lambda: count(1), compare=False)

    def put_whole(self, name: str, data: Data) -> None:
        self._step()
        super().put_whole(name, data)
        self._step()

    def delete(self, name: str) -> None:
        self._step()
        super().delete(name)
        self._step()

    def _step(self) -> None:
        if next(self.steps) == self.dies_at:
            raise KilledError


def stored(files: dict[str, bytes], dies_at: int = 0) -> DyingStore:
    return DyingStore({**files}, dict.fromkeys(files, 1), dies_at=dies_at)


@pytest.mark.parametrize("form", first_and_slow(["zstd", "sizes in tars", "texts"]))
def test_killed_at_any_request_of_an_object_store_a_rerun_ends_in_the_same_bytes(make, form):
    """Until then, the old cache is read, or the reader is told what to run again."""
    cache = make(**FORMS[form])
    write_build(cache, {"source": {}}, None)
    traces, before, ids = traces_of(cache, GONE), contents(cache), [IDS[row] for row in GONE]
    whole = stored(before)
    (done,) = withdraw([whole], ids)
    for step in count(1):
        store = stored(before, step)
        with suppress(KilledError):
            assert [each.seal for each in withdraw([store], ids)] == [done.seal]
            break
        if store.has("seal.json"):
            opened = open_cache(store)
            opened.read(np.arange(3))
            assert {CAPTIONS[0], CAPTIONS[1]} <= {*opened.captions(np.arange(3))}
        else:
            with pytest.raises(StaleError, match="cache-store withdraw"):
                open_cache(store)
        again = stored(store.files)
        assert [each.seal or done.seal for each in withdraw([again], ids)] == [done.seal]
        assert again.files == whole.files
    assert step > 24, "two for each of twelve writes"
    assert not remains(whole.files, traces)
    assert read_build(whole).withdrawing == ()
