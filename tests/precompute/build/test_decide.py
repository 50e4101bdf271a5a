"""The decisions of a rerun: tables of facts and requests, and the work or the refusal.

The cache's folder does not exist, so a decision that touched a disk would fail.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from cache_store.cache.commit import make_seal
from cache_store.cache.metadata import PartOnDisk, record_bytes
from cache_store.cache.survey import Reading, ShardOnDisk, Survey
from cache_store.errors import CacheError, ConfigError, StaleError
from cache_store.format import schema
from cache_store.format.formats import shard_format
from cache_store.format.layout import SPEC_FILE, part_file, samples_file
from cache_store.format.plan import PartHash, samples_digest, texts_digest, without_samples
from cache_store.format.record import sign
from cache_store.format.roll import Roll
from cache_store.storage.local import LocalStore
from precompute.build.decide import Work, damaged_metadata, decide
from precompute.build.planning import ListedParts
from precompute.build.refusals import growth_notes, refuse_other_samples
from precompute.build.request import BuildRequest
from precompute.build.source import compare_lists
from precompute.build.stated import Planned, Stated, spec_of
from precompute.build.steps import grown_spec, planned_work, state_of
from precompute.config import BuildConfig, StoreConfig
from precompute.encoders.encoder_config import EncoderConfig
from precompute.sources.config import SourceConfig
from precompute.sources.images import ALL
from precompute.sources.listing import Samples
from tests.make_cache import caption, make_array, make_encoder, make_plan, sized_array

PER_SHARD = PER_PART = 8
SIZED = sized_array((1, 1, 1), None)
ARRAY = make_array((1, 1, 1), "float16", "none", make_encoder(4, [0.0], [1.0]))
RECIPE = schema.Recipe(format_version=1, store_format="zarr", samples_per_shard=PER_SHARD, array=ARRAY)
TALLER = msgspec.structs.replace(RECIPE, array=make_array((1, 2, 1), "float16", "none", ARRAY.encoder))


STORE = LocalStore(Path("C"))
"""A folder that does not exist."""

SUMMARY = schema.ArraySummary(bytes=1, mean=(0.0,), std=(0.0,), minimum=(0.0,), maximum=(0.0,), preview=None)


def samples(numbers: Sequence[int] = range(12), **uris: str) -> pa.Table:
    """Make a plan; with twelve samples, the second part has four."""
    ids = [f"s{number:02d}" for number in numbers]
    plan = make_plan(len(ids), ids, None)
    return plan.set_column(1, plan.schema.field(1), [[uris.get(name, f"{name}.png") for name in ids]])


def cut(table: pa.Table, rows: int = PER_PART) -> list[pa.Table]:
    return [table.slice(first, rows) for first in range(0, table.num_rows, rows)]


def part_on_disk(number: int, rows: pa.Table, size: int = PER_SHARD, content: str = "") -> PartOnDisk:
    part_hash = PartHash()
    for shard in cut(rows, size):
        part_hash.add(shard)
    file, lengths = schema.FileRecord(path=part_file(number), bytes=1, sha256=content), tuple(map(len, cut(rows, size)))
    return PartOnDisk(file=file, digests=part_hash.digests(), lengths=lengths, sizes=(SIZED.size.name,) * len(lengths))


def parts_of(plan: pa.Table, size: int = PER_SHARD, content: str = "") -> tuple[Reading[PartOnDisk], ...]:
    return tuple(Reading(part_on_disk(number, rows, size, content)) for number, rows in enumerate(cut(plan)))


def record(
    spec: schema.Spec, samples: Sequence[str], shard: int, content: str, withdrawn: int = 0
) -> schema.CommitRecord:
    """Make the record of a shard with this content."""
    count, names = len(spec.shard_rows(shard)), (shard_format(spec).shard_file(shard), samples_file(shard))
    made = schema.CommitContent(
        shard=shard, first_row=spec.shard_rows(shard).start, array=SIZED.size.name, recipe=spec.recipe,
        samples=samples[shard],
        files=tuple(schema.FileRecord(path=name, bytes=1, sha256=content) for name in names),
        rows_digest="", cached=count, rejected=0, reasons={}, non_finite=0,
        sums="", proof=0, withdrawn=withdrawn,
    )  # fmt: skip
    run = schema.CommitRun(attempt=1, seconds=1.0, images_per_s=1.0, host="", device="cpu", versions={})
    return sign(schema.CommitRecord(format_version=1, content=made, run=run, sha256=""))


def digests_of(parts: Sequence[Reading[PartOnDisk]]) -> list[str]:
    return [digest for each in parts for digest in each.value.digests.shards]


def surveyed(recipe: schema.Recipe = RECIPE, plan: pa.Table | None = None, content: str = "") -> Survey:
    """Make the survey of a whole, sealed cache."""
    plan = samples() if plan is None else plan
    parts = parts_of(plan, recipe.samples_per_shard, content)
    spec = spec_of(recipe, [each.value for each in parts], lambda _: SIZED)
    records = {shard: record(spec, digests_of(parts), shard, content) for shard in range(spec.num_shards)}
    contents = [each.content for each in records.values()]
    roll = Roll.of(spec, contents)
    beside = record_bytes("rejected.parquet", b""), record_bytes("shards.bin", roll.data)
    seal = make_seal(spec, contents, [], [each.value.file for each in parts], *beside, SUMMARY)
    texts = {
        number: schema.PartTexts(digest=texts_digest(rows), bytes=1, sha256="") for number, rows in enumerate(cut(plan))
    }
    return Survey(
        store=STORE, has_cache=True, spec=Reading(spec), parts=parts,
        seal=Reading(seal), roll=Reading(roll), texts=texts, stated_texts=texts,
        build=Reading(sign(schema.BuildRecord(format_version=1, config={}, sha256=""))),
        shards={shard: ShardOnDisk(record=Reading(each)) for shard, each in records.items()},
        metadata=dict(shard_format(spec).metadata()),
    )  # fmt: skip


WHOLE, FOREIGN = surveyed(), surveyed(content="of another machine")
DAMAGED: Reading[Any] = Reading(problem=CacheError("it is damaged"))


def shard_1(on_disk: ShardOnDisk | None, found: Survey = WHOLE) -> Survey:
    return replace(found, shards={0: found.shards[0]} | ({} if on_disk is None else {1: on_disk}))


def without(*names: str) -> Survey:
    lost: dict[str, Any] = {name: Reading() for name in names}
    if "parts" in names:
        lost["parts"] = (Reading(), Reading())
    if "spec" in names:
        lost["metadata"] = {SPEC_FILE: None}
    return replace(WHOLE, **lost)


class Inputs(NamedTuple):
    """What decisions take from the inputs of a build."""

    request: BuildRequest
    recipe: schema.Recipe = RECIPE
    store: Any = STORE

    def array_of(self, size: schema.Size) -> schema.SizedArray:
        return SIZED


CONFIG = BuildConfig(
    cache="C",
    source=SourceConfig(kind="llava", path="L"),
    encoder=EncoderConfig(model="M"),
    store=StoreConfig(rows_per_part=PER_PART),
)


class Case(NamedTuple):
    """A survey, the source's samples, a request and the recipe asked for."""

    found: Survey = WHOLE
    source: pa.Table = samples()
    request: BuildRequest = BuildRequest()
    recipe: schema.Recipe = RECIPE
    recovered: Mapping[int, int] = MappingProxyType({})
    """Shards with rejected samples that can be decoded now."""
    plan: pa.Table = samples()
    """The rows of the plan on disk."""

    def decided(self) -> tuple[Work, list[int]]:
        """Return the work, and the parts that are written again."""
        inputs: Any = Inputs(self.request, self.recipe)
        stated = state_of(inputs, self.found)
        listing = ListedParts(lambda _: Samples(self.source.to_pylist()), [ALL], CONFIG)
        now = compare_lists(stated, listing, cut(self.plan).__getitem__, restored(stated))
        num_left_out, added = refuse_other_samples(stated, now, self.request), list[PartOnDisk]()
        if not stated.spec or self.request.new_samples == "append":
            added = [part_on_disk(number, rows) for number, rows in enumerate(now.new, start=stated.num_parts)]
        spec = grown_spec(inputs, stated.spec, added)
        rows = Planned(inputs.store, spec, stated, now.found, added)
        work = decide(stated, spec, rows.facts_of, rows.texts_of, self.request).with_recovered(0, self.recovered)
        growth = growth_notes(stated, now, work, num_left_out)
        return replace(work, notes=(*damaged_metadata(stated), *work.damage, *work.notes, *growth)), [*now.found]


def restored(stated: Stated) -> Any:
    """Return what finds the rows of a lost part in a table."""
    return lambda part, rows: rows if samples_digest(rows) == stated.spec.parts[part].digest else None


LONGER = samples(range(20))
APPEND, LEAVE_OUT = BuildRequest(new_samples="append"), BuildRequest(new_samples="leave out")
SWAPPED = replace(WHOLE, parts=parts_of(samples([1, 0, *range(2, 12)])), seal=Reading(), shards={})
OTHER_NAMES = replace(WHOLE, parts=parts_of(samples(s09="x")))
FINER = msgspec.structs.replace(RECIPE, samples_per_shard=4)
OTHER_SPEC = replace(surveyed(FINER), **{name: getattr(WHOLE, name) for name in ("shards", "seal", "roll", "parts")})
NO_FILE = ShardOnDisk(record=WHOLE.shards[1].record, file_problems={"f": CacheError("C/f is missing")})
NO_RECORD = ShardOnDisk(record=DAMAGED)
NO_SEAL = without("seal", "roll")
SPEC_DAMAGED = replace(WHOLE, spec=DAMAGED, metadata={SPEC_FILE: b"damaged"})
NO_ARRAY = replace(WHOLE, metadata={**WHOLE.metadata, "latents/8x8/zarr.json": None})
OTHER_SEAL = replace(WHOLE, seal=FOREIGN.seal, roll=FOREIGN.roll)
OTHER_SIZE = replace(WHOLE, seal=surveyed(TALLER).seal, roll=surveyed(TALLER).roll)
TWO_RECIPES = shard_1(surveyed(TALLER).shards[1])
NO_RECIPE = replace(without("spec", "seal", "roll"), shards={0: NO_RECORD})
FOREIGN_PLAN = replace(without("spec", "seal", "roll"), parts=OTHER_NAMES.parts)
PLAN, AGAIN, EXTENDS = "is lost or is not the planned one", "shard 1: ", "from 12 to 20"


def withdrawn(*places: int) -> pa.Table:
    """Make a plan of twelve samples, some of them withdrawn."""
    return without_samples(samples(), np.isin(np.arange(12), places))


OTHER_TEXTS = samples().set_column(7, "conversations", [[caption("another")] * 12])
LEFT = surveyed(plan=withdrawn(9)).texts
GONE = replace(NO_SEAL, parts=parts_of(withdrawn(9)), texts=LEFT, stated_texts=LEFT)
COUNTS_2 = shard_1(
    ShardOnDisk(record=Reading(record(WHOLE.spec.value, digests_of(WHOLE.parts), 1, "", withdrawn=2))), NO_SEAL
)

DONE: dict[str, tuple[Case, list[int], list[int], str]] = {
    "a new cache": (Case(Survey(store=STORE)), [0, 1], [0, 1], ""),
    "a finished cache": (Case(), [], [], ""),
    "a shard not built yet": (Case(shard_1(None, NO_SEAL)), [1], [1], ""),
    "a lost record": (Case(shard_1(None)), [1], [], f"{AGAIN}its record is missing"),
    "a damaged record": (Case(shard_1(NO_RECORD)), [1], [], f"{AGAIN}it is damaged"),
    "a lost file": (Case(shard_1(NO_FILE)), [1], [], f"{AGAIN}C/f is missing"),
    "a foreign shard": (Case(shard_1(FOREIGN.shards[1])), [1], [], "is not the record that the cache was sealed with"),
    "a shard of other samples": (
        Case(shard_1(surveyed(plan=samples(s09="x")).shards[1])),
        [1],
        [],
        "for other samples",
    ),
    "a repair": (Case(request=BuildRequest(rebuild=[0])), [0], [], ""),
    "a repair where the list grew": (Case(source=LONGER, request=LEAVE_OUT), [], [], "new in the source: 8 samples"),
    "a retry": (Case(recovered={1: 2}), [1], [1], ""),
    "a lost spec": (Case(without("spec")), [], [], "zarr.json is missing"),
    "a damaged spec": (Case(SPEC_DAMAGED), [], [], "it is damaged"),
    "no metadata of the array": (Case(NO_ARRAY), [], [], "latents/8x8/zarr.json is missing"),
    "neither spec nor records": (Case(replace(without("spec"), shards={})), [0, 1], [], "zarr.json is missing"),
    "a spec of another recipe": (Case(OTHER_SPEC), [], [], "zarr.json is not what the spec says it should be"),
    "a lost plan": (Case(without("parts")), [], [], PLAN),
    "a swapped plan": (Case(SWAPPED), [0, 1], [0, 1], PLAN),
    "a plan of other names": (Case(OTHER_NAMES), [], [], PLAN),
    "lost texts": (Case(replace(WHOLE, texts={0: WHOLE.texts[0]})), [], [], "the texts of part 1 are lost"),
    "other texts": (Case(source=OTHER_TEXTS), [], [], "precompute captions C"),
    "a shard with a withdrawn sample": (Case(GONE, plan=withdrawn(9)), [1], [1], ""),
    "a plan of other bytes": (Case(replace(WHOLE, parts=FOREIGN.parts)), [], [], ""),
    "a lost seal": (Case(NO_SEAL), [], [], ""),
    "a damaged seal": (Case(replace(NO_SEAL, seal=DAMAGED)), [], [], "it is damaged"),
    "a foreign seal": (Case(OTHER_SEAL), [0, 1], [], "is not the record that the cache was sealed with"),
    "an extension": (Case(source=LONGER, request=APPEND), [2], [2], EXTENDS),
    "one beside damage": (Case(shard_1(NO_FILE), LONGER, APPEND), [1, 2], [2], EXTENDS),
}
"""Cases, the shards to build, those of them whose content is free, and a note."""


@pytest.mark.parametrize("name", DONE)
def test_what_is_kept_and_built(name):
    case, to_build, free, said = DONE[name]
    work, written = case.decided()
    count = 12 if case.request is LEAVE_OUT else case.source.num_rows
    assert (work.to_build, work.spec.rows) == (to_build, count)
    vouching = FOREIGN if case.found is OTHER_SEAL else WHOLE
    held = {shard: vouching.records[shard].content.digest for shard in {*to_build} - {*free}}
    assert work.digests == held
    new = "replace" if name in ("a retry", "a shard with a withdrawn sample") else "build"
    assert {shard: task.state for shard, task in work.tasks.items()} == {
        shard: new if shard in free else "mend" for shard in to_build
    }
    assert said in " ".join(work.notes)
    assert bool(work.notes) == bool(said)
    assert bool(written) is (said == PLAN or name == "lost texts")
    if said == EXTENDS:
        assert work.spec.bounds.tolist() == [0, 8, 12, 20]


REFUSED: dict[str, tuple[Case, type[Exception], list[str]]] = {
    "another recipe": (Case(recipe=TALLER), StaleError, ["array.image.rule.sizes", "--cache NEW"]),
    "one, which the seal has": (Case(OTHER_SIZE, recipe=TALLER), StaleError, ["array.image.rule.sizes"]),
    "two recipes": (Case(TWO_RECIPES), StaleError, ["commits/000001.json", "array.image.rule.sizes"]),
    "no recipe": (Case(NO_RECIPE), StaleError, ["zarr.json", "seal.json", "commits/"]),
    "new samples": (Case(source=LONGER), StaleError, ["s12", "--extend"]),
    "gone": (Case(source=samples(range(1, 20)), request=APPEND), StaleError, ["s00", "--cache NEW"]),
    "gone, no plan": (Case(without("parts"), samples(range(1, 12))), StaleError, ["C/plan"]),
    "foreign plan, no spec or seal": (Case(FOREIGN_PLAN), StaleError, ["C/plan"]),
    "another name": (Case(source=samples(s09="x")), StaleError, ["s09"]),
    "a plan without a withdrawal": (Case(COUNTS_2), CacheError, ["C/plan", "withdrawals of 1 shard"]),
    "no such shard": (Case(request=BuildRequest(rebuild=[2])), ConfigError, ["2"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_what_differs(name):
    case, error, named = REFUSED[name]
    with pytest.raises(error) as caught:
        case.decided()
    assert [each for each in named if each not in str(caught.value)] == []


FOR_RANKS: dict[str, tuple[Survey, list[int] | None]] = {
    "a shard not built yet": (shard_1(None, NO_SEAL), [1]),
    "a finished cache": (WHOLE, []),
    "a lost plan": (without("parts"), None),
    "a lost build record": (without("build"), None),
    "a lost record, sealed": (shard_1(None), None),
    "a lost file": (shard_1(NO_FILE, NO_SEAL), None),
    "another recipe": (OTHER_SIZE, None),
}
"""Surveys, and the shards that ranks build; None if ranks and the seal after them are refused."""


@pytest.mark.parametrize("name", FOR_RANKS)
def test_ranks_build_a_whole_plan_and_mend_nothing(name):
    found, to_build = FOR_RANKS[name]
    inputs: Any = Inputs(BuildRequest(), TALLER if name == "another recipe" else RECIPE)
    with pytest.raises((CacheError, StaleError)) if to_build is None else nullcontext():
        work = planned_work(inputs, found)
        assert work.to_build == work.shards_to("build") == to_build
