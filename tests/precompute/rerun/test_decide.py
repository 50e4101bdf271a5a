"""The decisions of a rerun: tables of facts and requests, and the work or the refusal.

The facts hold a store that can do nothing and lists that cannot be read, so a decision that touched a disk would fail.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from io import BytesIO
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pytest

from cache_store.cache.commit import make_seal
from cache_store.cache.metadata import record_bytes
from cache_store.cache.survey import PlanOnDisk, Reading, ShardOnDisk, Survey
from cache_store.errors import CacheError, ConfigError, StaleError
from cache_store.format import schema
from cache_store.format.formats import shard_format
from cache_store.format.layout import SPEC_FILE, part_file, samples_file
from cache_store.format.plan import Plan, PlanPart, texts_digest, write_part
from cache_store.format.record import sign
from cache_store.format.roll import Roll
from cache_store.format.tables import TableFile
from cache_store.verify.findings import Report
from precompute.rerun.arrange import OneSize
from precompute.rerun.decide import Work, certain_bytes, decide, decide_planned
from precompute.rerun.facts import Facts, compare_lists, planned_facts
from precompute.rerun.request import BuildRequest
from precompute.rerun.rows import ListedRows, Rows, rows_in_scratch, slices_of
from tests.make_cache import caption, make_array, make_encoder, make_plan, sized_array

PER_SHARD = PER_PART = 8
SIZED = sized_array((1, 1, 1), None)
ARRAY = make_array((1, 1, 1), "float16", "none", make_encoder(4, [0.0], [1.0]))
RECIPE = schema.Recipe(format_version=1, store_format="zarr", samples_per_shard=PER_SHARD, array=ARRAY)
TALLER = msgspec.structs.replace(RECIPE, array=make_array((1, 2, 1), "float16", "none", ARRAY.encoder))


class NoStore:
    """A store that has only a name."""

    def __str__(self) -> str:
        return "C"

    def where(self, name: str) -> str:
        return f"C/{name}"


SUMMARY = schema.ArraySummary(bytes=1, mean=(0.0,), std=(0.0,), minimum=(0.0,), maximum=(0.0,), preview=None)


def samples(numbers: Sequence[int] = range(12), **uris: str) -> pa.Table:
    """Make a plan; with twelve samples, the second part has four."""
    ids = [f"s{number:02d}" for number in numbers]
    plan = make_plan(len(ids), ids, None)
    return plan.set_column(1, plan.schema.field(1), [[uris.get(name, f"{name}.png") for name in ids]])


def array_of(name: str) -> schema.SizedArray:
    return SIZED


def listed(table: pa.Table) -> ListedRows:
    return rows_in_scratch(slices_of(table, PER_SHARD))


def rows(table: pa.Table, size: int = PER_SHARD) -> Rows:
    return OneSize(SIZED, size, PER_PART).arrange_new(listed(table))


def record(spec: schema.Spec, plan: pa.Table, shard: int, content: str, withdrawn: int = 0) -> schema.CommitRecord:
    """Make the record of a shard with this content."""
    count, names = len(spec.shard_rows(shard)), (shard_format(spec).shard_file(shard), samples_file(shard))
    made = schema.CommitContent(
        shard=shard, first_row=spec.shard_rows(shard).start, array=SIZED.size.name, recipe=spec.recipe,
        samples=rows(plan, spec.samples_per_shard).digests.shards[shard],
        files=tuple(schema.FileRecord(path=name, bytes=1, sha256=content) for name in names),
        rows_digest="", cached=count, rejected=0, reasons={}, non_finite=0,
        sums="", proof=0, withdrawn=withdrawn,
    )  # fmt: skip
    run = schema.CommitRun(attempt=1, seconds=1.0, images_per_s=1.0, host="", device="cpu", versions={})
    return sign(schema.CommitRecord(format_version=1, content=made, run=run, sha256=""))


def plan_on_disk(planned: Rows, content: str = "") -> Reading[PlanOnDisk]:
    files, parts = list[schema.FileRecord](), list[PlanPart]()
    for part in range(len(planned.cut.parts)):
        shards = planned.cut.shards_of(part)
        write_part(stream := BytesIO(), ((planned.shard(shard), SIZED.size.name) for shard in shards))
        parts.append(PlanPart(TableFile(partial(BytesIO, stream.getvalue()), part_file(part))))
        files.append(schema.FileRecord(path=part_file(part), bytes=1, sha256=content))
    plan = Plan(planned.cut.parts, parts.__getitem__, lambda part: None, lambda: None)
    return Reading(PlanOnDisk(plan=plan, files=tuple(files), digests=planned.digests))


def surveyed(recipe: schema.Recipe = RECIPE, plan: pa.Table | None = None, content: str = "") -> Survey:
    """Make the survey of a whole, sealed cache."""
    plan = samples() if plan is None else plan
    planned = rows(plan, recipe.samples_per_shard)
    spec = planned.spec(recipe)
    records = {shard: record(spec, plan, shard, content) for shard in range(spec.num_shards)}
    on_disk = plan_on_disk(planned, content)
    contents = [each.content for each in records.values()]
    roll = Roll.of(spec, contents)
    beside = record_bytes("rejected.parquet", b""), record_bytes("shards.bin", roll.data)
    seal = make_seal(spec, contents, [], on_disk.value.files, *beside, SUMMARY)
    digests = (texts_digest(pa.concat_tables(map(planned.shard, each))) for each in map(planned.cut.shards_of, (0, 1)))
    texts = {part: schema.PartTexts(digest=each, bytes=1, sha256="") for part, each in enumerate(digests)}
    return Survey(
        store=NoStore(), has_cache=True, spec=Reading(spec), plan=on_disk,
        seal=Reading(seal), roll=Reading(roll), texts=texts,
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
    if "spec" in names:
        lost["metadata"] = {SPEC_FILE: None}
    return replace(WHOLE, **lost)


class Case(NamedTuple):
    """A survey, the source's samples, a request and the recipe asked for."""

    found: Survey = WHOLE
    source: pa.Table = samples()
    request: BuildRequest = BuildRequest()
    recipe: schema.Recipe = RECIPE
    recovered: Mapping[int, int] = MappingProxyType({})
    """Shards with rejected samples that can be decoded now."""

    def decided(self) -> Work:
        arranger, grows = OneSize(SIZED, PER_SHARD, PER_PART), self.request.new_samples == "append"
        facts = compare_lists(self.found, self.recipe, listed(self.source), array_of, arranger, grows=grows)
        return decide(unreadable(facts), self.request).with_recovered(0, self.recovered)


def unreadable(facts: Facts) -> Facts:
    """Remove the files that a decision could read."""

    def closed(found: Any) -> Any:
        return found and replace(found, plan=None)

    found = replace(facts.survey, plan=replace(facts.survey.plan, value=closed(facts.survey.plan.value)))
    return replace(facts, survey=found, found=closed(facts.found), planned=closed(facts.planned))


def reported(survey: Survey) -> BuildRequest:
    """Make the request for a repair of shard 1, by a verification's report on that cache."""
    identity = survey.seal.value.identity
    report = Report(cache="C", level="full", identity=identity, shards=2, samples=12, bytes=4, findings=())
    return BuildRequest(rebuild=[1], report=report)


LONGER = samples(range(20))
APPEND, LEAVE_OUT = BuildRequest(new_samples="append"), BuildRequest(new_samples="leave out")
SWAPPED = replace(WHOLE, plan=plan_on_disk(rows(samples([1, 0, *range(2, 12)]))), seal=Reading(), shards={})
OTHER_NAMES = replace(WHOLE, plan=plan_on_disk(rows(samples(s09="x"))))
FINER = msgspec.structs.replace(RECIPE, samples_per_shard=4)
OTHER_SPEC = replace(surveyed(FINER), **{name: getattr(WHOLE, name) for name in ("shards", "seal", "roll", "plan")})
OTHER_PART = schema.Part(rows=12, shards=2, digest="0")
OTHER_PLAN = replace(
    WHOLE,
    spec=Reading(RECIPE.spec([OTHER_PART], schema.even_shards(12, PER_SHARD, SIZED.size.name), [SIZED])),
    metadata={SPEC_FILE: b"of another plan"},
)
NO_FILE = ShardOnDisk(record=WHOLE.shards[1].record, file_problems={"f": CacheError("C/f is missing")})
NO_RECORD = ShardOnDisk(record=DAMAGED)
NO_SEAL = without("seal", "roll")
SPEC_DAMAGED = replace(WHOLE, spec=DAMAGED, metadata={SPEC_FILE: b"damaged"})
NO_ARRAY = replace(WHOLE, metadata={**WHOLE.metadata, "latents/8x8/zarr.json": None})
OTHER_SEAL = replace(WHOLE, seal=FOREIGN.seal, roll=FOREIGN.roll)
OTHER_SIZE = replace(WHOLE, seal=surveyed(TALLER).seal, roll=surveyed(TALLER).roll)
BESIDE_OTHER = replace(without("spec"), seal=OTHER_SIZE.seal, roll=OTHER_SIZE.roll)
TWO_RECIPES = shard_1(surveyed(TALLER).shards[1])
NO_RECIPE = replace(without("spec", "seal", "roll"), shards={0: NO_RECORD})
FOREIGN_PLAN = replace(without("spec", "seal", "roll"), plan=OTHER_NAMES.plan)
PLAN, AGAIN, EXTENDS = "plan/ is written again from the source", "shard 1 is built again: ", "from 12 to 20"


def withdrawn(*places: int) -> pa.Table:
    """Make a plan of twelve samples, some of them withdrawn."""
    plan, states = samples(), ["withdrawn" if place in places else "planned" for place in range(12)]
    return plan.set_column(plan.column_names.index("state"), "state", [states])


OTHER_TEXTS = samples().set_column(7, "conversations", [[caption("another")] * 12])
GONE = replace(NO_SEAL, plan=plan_on_disk(rows(withdrawn(9))))
COUNTS_2 = shard_1(ShardOnDisk(record=Reading(record(WHOLE.spec.value, samples(), 1, "", withdrawn=2))), NO_SEAL)

DONE: dict[str, tuple[Case, list[int], list[int], str]] = {
    "a new cache": (Case(Survey(store=NoStore())), [0, 1], [0, 1], ""),
    "a finished cache": (Case(), [], [], ""),
    "a shard not built yet": (Case(shard_1(None, NO_SEAL)), [1], [1], ""),
    "a lost record": (Case(shard_1(None)), [1], [], ""),
    "a damaged record": (Case(shard_1(NO_RECORD)), [1], [], f"{AGAIN}it is damaged"),
    "a lost file": (Case(shard_1(NO_FILE)), [1], [], f"{AGAIN}C/f is missing"),
    "a lost file, no seal": (Case(shard_1(NO_FILE, NO_SEAL)), [1], [], f"{AGAIN}C/f is missing"),
    "a foreign shard": (Case(shard_1(FOREIGN.shards[1])), [1], [], "is not the record that the cache was sealed with"),
    "a shard of other samples": (
        Case(shard_1(surveyed(plan=samples(s09="x")).shards[1])),
        [1],
        [],
        "for other samples",
    ),
    "a repair": (Case(request=BuildRequest(rebuild=[0])), [0], [], ""),
    "a repair by report": (Case(request=reported(WHOLE)), [1], [], ""),
    "a repair where the list grew": (Case(source=LONGER, request=LEAVE_OUT), [], [], "new in the source: 8 samples"),
    "a retry": (Case(recovered={1: 2}), [1], [1], ""),
    "a retry beside damage": (Case(shard_1(NO_FILE), recovered={0: 1}), [0, 1], [0], AGAIN),
    "a lost spec": (Case(without("spec")), [], [], "zarr.json: is missing"),
    "a damaged spec": (Case(SPEC_DAMAGED), [], [], "zarr.json: is not what the spec says it should be"),
    "no metadata of the array": (Case(NO_ARRAY), [], [], "latents/8x8/zarr.json: is missing"),
    "neither spec nor records": (Case(replace(without("spec"), shards={})), [0, 1], [], "zarr.json: is missing"),
    "a spec of another recipe": (Case(OTHER_SPEC), [], [], "zarr.json: is not what the spec says it should be"),
    "a spec of another plan": (Case(OTHER_PLAN), [], [], "zarr.json: is not what the spec says it should be"),
    "no spec, the seal of another recipe": (Case(BESIDE_OTHER), [], [], "zarr.json: is missing"),
    "a lost build record": (Case(without("build")), [], [], "build.json: is missing"),
    "a lost plan": (Case(without("plan")), [], [], PLAN),
    "a swapped plan": (Case(SWAPPED), [0, 1], [0, 1], PLAN),
    "a damaged plan": (Case(replace(WHOLE, plan=DAMAGED)), [], [], PLAN),
    "a plan of other names": (Case(OTHER_NAMES), [], [], PLAN),
    "lost texts": (Case(replace(WHOLE, texts={0: WHOLE.texts[0]})), [], [], "the texts of 1 part are written again"),
    "other texts": (Case(source=OTHER_TEXTS), [], [], "precompute captions C"),
    "a shard with a withdrawn sample": (Case(GONE, withdrawn(9)), [1], [1], ""),
    "a plan of other bytes": (Case(replace(WHOLE, plan=FOREIGN.plan)), [], [], PLAN),
    "neither spec nor plan": (Case(without("spec", "plan")), [], [], "zarr.json: is missing"),
    "neither spec nor seal": (Case(without("spec", "seal", "roll")), [], [], "zarr.json: is missing"),
    "a lost seal": (Case(NO_SEAL), [], [], ""),
    "a damaged seal": (Case(replace(NO_SEAL, seal=DAMAGED)), [], [], "the seal is made again from the records"),
    "a foreign seal": (Case(OTHER_SEAL), [], [], PLAN),
    "an extension": (Case(source=LONGER, request=APPEND), [2], [2], EXTENDS),
    "one beside damage": (Case(shard_1(NO_FILE), LONGER, APPEND), [1, 2], [2], EXTENDS),
    "one without a spec": (Case(without("spec"), LONGER, APPEND), [2], [2], EXTENDS),
}
"""Cases, the shards to build, those of them whose content is free, and a note."""


@pytest.mark.parametrize("name", DONE)
def test_what_is_kept_and_built(name):
    case, to_build, free, said = DONE[name]
    work = case.decided()
    count = 12 if case.request is LEAVE_OUT else case.source.num_rows
    assert (work.to_build, work.spec.rows) == (to_build, count)
    vouching = [WHOLE, FOREIGN] if case.found is OTHER_SEAL else [WHOLE]
    held = {shard: {each.records[shard].content.digest for each in vouching} for shard in {*to_build} - {*free}}
    assert work.allowed_digests == held
    assert said in " ".join(work.notes)
    assert bool(work.notes) == bool(said)
    is_new = name == "a new cache" or said == EXTENDS
    assert work.is_planned is not (is_new or said == PLAN or name == "neither spec nor plan")
    is_replaced = bool(case.recovered) or name == "a shard with a withdrawn sample"
    assert work.has_other_samples is (is_replaced or said == EXTENDS)
    if said == EXTENDS:
        assert work.spec.bounds.tolist() == [0, 8, 12, 20]


REFUSED: dict[str, tuple[Case, type[Exception], list[str]]] = {
    "another recipe": (Case(recipe=TALLER), StaleError, ["array.image.rule.sizes", "--cache NEW"]),
    "one, no spec": (Case(without("spec"), recipe=TALLER), StaleError, ["array.image.rule.sizes"]),
    "one, which the seal has": (Case(OTHER_SIZE, recipe=TALLER), StaleError, ["array.image.rule.sizes"]),
    "one, extending": (Case(source=LONGER, request=APPEND, recipe=TALLER), StaleError, ["array.image.rule.sizes"]),
    "two recipes": (Case(TWO_RECIPES), StaleError, ["commits/000001.json", "array.image.rule.sizes"]),
    "no recipe": (Case(NO_RECIPE), StaleError, ["zarr.json", "seal.json", "commits/"]),
    "new samples": (Case(source=LONGER), StaleError, ["s12", "--extend"]),
    "new, no spec": (Case(without("spec"), LONGER), StaleError, ["s12", "--extend"]),
    "gone": (Case(source=samples(range(1, 20)), request=APPEND), StaleError, ["s00", "--cache NEW"]),
    "gone, no plan": (Case(without("plan"), samples(range(1, 12))), StaleError, ["C/plan"]),
    "no spec, seal or plan": (Case(without("spec", "seal", "roll", "plan")), StaleError, ["C/plan"]),
    "no plan, another seal": (Case(replace(BESIDE_OTHER, plan=Reading())), StaleError, ["C/plan"]),
    "foreign plan, no spec or seal": (Case(FOREIGN_PLAN), StaleError, ["C/plan"]),
    "another name": (Case(source=samples(s09="x")), StaleError, ["s09"]),
    "another name, no spec": (Case(without("spec"), samples(s09="x")), StaleError, ["s09"]),
    "another name, no plan": (Case(without("plan"), samples(s09="x")), StaleError, ["C/plan"]),
    "a plan without a withdrawal": (Case(COUNTS_2), CacheError, ["C/plan", "withdrawals of 1 shard"]),
    "another's report": (Case(request=reported(FOREIGN)), StaleError, ["C", "cache-store verify C"]),
    "no such shard": (Case(request=BuildRequest(rebuild=[2])), ConfigError, ["2"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_what_differs(name):
    case, error, named = REFUSED[name]
    with pytest.raises(error) as caught:
        case.decided()
    assert [each for each in named if each not in str(caught.value)] == []


RETRACTED = shard_1(None, replace(NO_SEAL, retracted=frozenset([1])))
STATES: dict[str, tuple[Case, dict[int, str]]] = {
    "a new cache": (Case(Survey(store=NoStore())), {0: "build", 1: "build"}),
    "a shard not built yet": (Case(shard_1(None, NO_SEAL)), {1: "build"}),
    "one that a dead build retracted": (Case(RETRACTED), {1: "replace"}),
    "a lost record, sealed": (Case(shard_1(None)), {1: "mend"}),
    "a damaged record, no seal": (Case(shard_1(NO_RECORD, NO_SEAL)), {1: "mend"}),
    "a repair": (Case(request=BuildRequest(rebuild=[0])), {0: "mend"}),
    "a retry": (Case(recovered={1: 2}), {1: "replace"}),
    "an extension": (Case(source=LONGER, request=APPEND), {2: "build"}),
}
"""Cases, and the state of each shard that is not kept."""


@pytest.mark.parametrize("name", STATES)
def test_each_shard_that_is_not_kept_is_built_mended_or_replaced(name):
    case, states = STATES[name]
    assert {shard: task.state for shard, task in case.decided().tasks.items()} == states


def test_only_a_new_uncompressed_cache_certainly_needs_space():
    """12 samples of 2 bytes, of which a fifth may be rejected."""
    new = Survey(store=NoStore())
    packed = msgspec.structs.replace(RECIPE, array=msgspec.structs.replace(ARRAY, codec="zstd"))
    works = [case.decided() for case in (Case(new), Case(new, recipe=packed), Case(WHOLE))]
    assert [round(certain_bytes(work, max_reject_fraction=0.2), 6) for work in works] == [19.2, 0.0, 0.0]


FOR_RANKS: dict[str, tuple[Survey, list[int] | None]] = {
    "a shard not built yet": (shard_1(None, NO_SEAL), [1]),
    "a finished cache": (WHOLE, []),
    "a lost plan": (without("plan"), None),
    "a plan of other bytes": (replace(WHOLE, plan=FOREIGN.plan), None),
    "a lost build record": (without("build"), None),
    "a lost record, sealed": (shard_1(None), None),
    "a lost file": (shard_1(NO_FILE, NO_SEAL), None),
    "another recipe": (OTHER_SIZE, None),
}
"""Surveys, and the shards that ranks build; None if ranks and the seal after them are refused."""


@pytest.mark.parametrize("name", FOR_RANKS)
def test_ranks_build_a_whole_plan_and_mend_nothing(name):
    found, to_build = FOR_RANKS[name]
    facts = unreadable(planned_facts(found, TALLER if name == "another recipe" else RECIPE, array_of))
    with pytest.raises((CacheError, StaleError)) if to_build is None else nullcontext():
        work = decide_planned(facts, BuildRequest())
        assert work.to_build == work.shards_to("build") == to_build
