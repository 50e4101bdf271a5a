"""What a rerun does: a table of what was found and asked, and the work or the refusal. No disk is touched."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from cache_store.cache.seal import make_seal
from cache_store.cache.survey import PlanOnDisk, Reading, ShardOnDisk, Survey
from cache_store.errors import CacheError, ConfigError, StaleError
from cache_store.format.formats import shard_format
from cache_store.format.plan import plan_digests
from cache_store.format.record import FORMAT_VERSION, record_digest, signed
from cache_store.format.schema import (
    PLAN_FILE,
    SPEC_FILE,
    BuildRecord,
    ChannelStatistics,
    CommitContent,
    CommitRecord,
    CommitRun,
    FileRecord,
    PreviewEquations,
    Recipe,
    Spec,
    samples_file,
)
from cache_store.storage.local import LocalStore
from cache_store.verify.findings import Report
from precompute.resume.decide import Wanted, Work, decide
from precompute.resume.request import BuildRequest
from tests.make_cache import caption, make_array, make_encoder, make_plan

SAMPLES, PER_SHARD = 12, 8
"""Two shards, the second half full."""

RECIPE = Recipe(
    format_version=FORMAT_VERSION,
    store_format="zarr",
    samples_per_shard=PER_SHARD,
    array=make_array((1, 1, 1), "float16", "none", make_encoder(4, [0.0], [1.0])),
)
TALLER = msgspec.structs.replace(RECIPE, array=make_array((1, 2, 1), "float16", "none", RECIPE.array.encoder))
LOST: Reading[Any] = Reading()
DAMAGED: Reading[Any] = Reading(problem=CacheError("it is damaged"))


def samples(numbers: Sequence[int] = range(SAMPLES), **texts: str) -> pa.Table:
    ids = [f"s{number:02d}" for number in numbers]
    return make_plan(len(ids), ids, [caption(texts.get(name, name)) for name in ids])


def record(spec: Spec, plan: pa.Table, shard: int, content: str = "") -> CommitRecord:
    """Of a shard whose files hold whatever `content` names."""
    count = len(spec.shard_rows(shard))
    channels, height, width = spec.array.shape
    sums = dict.fromkeys(("sum", "sum_of_squares", "minimum", "maximum"), (0.0,) * channels)
    names = (shard_format(spec).shard_file(shard), samples_file(shard))
    made = CommitContent(
        shard=shard,
        recipe=spec.recipe,
        plan_digest=plan_digests(plan, PER_SHARD).shards[shard],
        files=tuple(FileRecord(path=name, bytes=1, sha256=content) for name in names),
        rows_digest="",
        cached=count,
        rejected=0,
        reasons={},
        non_finite=0,
        statistics=ChannelStatistics(count=count * height * width, **sums),
        preview=PreviewEquations(gram=((1.0, 0.0), (0.0, 1.0)), moment=((0.0,) * 3,) * 2),
    )
    run = CommitRun(attempt=1, seconds=1.0, images_per_s=1.0, host="", device="cpu", versions={})
    return signed(CommitRecord(format_version=FORMAT_VERSION, content=made, run=run, sha256=""))


def plan_on_disk(table: pa.Table, spec: Spec, sha256: str = "as written") -> PlanOnDisk:
    digests = plan_digests(table.slice(0, spec.rows), PER_SHARD)
    return PlanOnDisk(table=table, file=FileRecord(path=PLAN_FILE, bytes=1, sha256=sha256), digests=digests)


def surveyed(recipe: Recipe = RECIPE, plan: pa.Table | None = None, content: str = "") -> Survey:
    """A whole sealed cache."""
    plan = samples() if plan is None else plan
    spec = recipe.spec(plan.num_rows, plan_digests(plan, PER_SHARD).whole)
    records = {shard: record(spec, plan, shard, content) for shard in range(spec.num_shards)}
    on_disk = plan_on_disk(plan, spec)
    return Survey(
        store=LocalStore(Path("C")),
        has_cache=True,
        spec=Reading(spec),
        seal=Reading(make_seal(spec, [each.content for each in records.values()], on_disk.file)),
        build=Reading(signed(BuildRecord(format_version=FORMAT_VERSION, config={}, sha256=""))),
        plan=Reading(on_disk),
        shards={shard: ShardOnDisk(record=Reading(each)) for shard, each in records.items()},
        metadata=dict(shard_format(spec).metadata(spec)),
        ids=dict(enumerate(plan["id"].to_pylist())),
    )


WHOLE = surveyed()
DIGESTS = {shard: record_digest(each.content) for shard, each in WHOLE.records.items()}
FOREIGN = surveyed(content="of another machine")
FOREIGN_DIGESTS = {shard: record_digest(each.content) for shard, each in FOREIGN.records.items()}


def shards(**changed: ShardOnDisk | None) -> dict[int, ShardOnDisk]:
    """Those of the whole cache, some (`_1=…`) changed or gone."""
    found = {**WHOLE.shards, **{int(name[1:]): each for name, each in changed.items()}}
    return {shard: each for shard, each in found.items() if each is not None}


def without(*names: str, survey: Survey = WHOLE) -> Survey:
    """A survey of a cache that has lost these files."""
    lost = replace(survey, **dict.fromkeys(names, LOST))
    if "spec" in names:
        plan = lost.plan.value and replace(lost.plan.value, digests=None)
        lost = replace(lost, metadata={SPEC_FILE: None}, plan=Reading(plan))
    return lost


def with_spec(spec: Spec) -> Survey:
    plan = WHOLE.plan.value
    return replace(WHOLE, spec=Reading(spec), metadata=dict(shard_format(spec).metadata(spec)), plan=Reading(plan))


def swapped() -> Survey:
    """A plan of which two samples have each other's image, and an unsealed cache that has not built them."""
    table, spec = samples(), WHOLE.spec.value
    uris = table["uri"].to_pylist()
    uris[0], uris[1] = uris[1], uris[0]
    table = table.set_column(2, "uri", pa.array(uris))
    return replace(without("seal"), plan=Reading(plan_on_disk(table, spec)), shards=shards(_0=None))


def begun(numbers: Sequence[int]) -> Survey:
    """An extension to these samples that was killed after its plan was written."""
    return replace(WHOLE, plan=Reading(plan_on_disk(samples(numbers), WHOLE.spec.value)))


OTHER_SEAL = replace(WHOLE, seal=surveyed(TALLER).seal)
"""The seal is that of another recipe."""
MISSING_FILE = ShardOnDisk(record=WHOLE.shards[1].record, file_problem="C/f is missing")
WRONG_DIGEST = msgspec.structs.replace(WHOLE.spec.value, plan_digest="0" * 64)
NOTHING_MORE = BuildRequest()
APPEND, LEAVE_OUT = BuildRequest(new_samples="append"), BuildRequest(new_samples="leave out")


@dataclass(frozen=True)
class Case:
    """What was found and is asked, and what is done about it."""

    found: Survey = WHOLE
    source: pa.Table | None = None
    recipe: Recipe = RECIPE
    request: BuildRequest = NOTHING_MORE
    kept: Sequence[int] = (0, 1)
    to_build: Sequence[int] = ()
    allowed: dict[int, set[str]] | None = None
    """Digests of some shards, where the case is about them; an empty set: anything."""
    writes_plan: bool = False
    said: Sequence[str] = ()
    """What each note holds."""
    rows: int = SAMPLES


DONE = {
    "a new cache": Case(Survey(store=LocalStore(Path("C"))), kept=(), to_build=(0, 1), writes_plan=True),
    "a finished cache": Case(allowed={0: {DIGESTS[0]}, 1: {DIGESTS[1]}}),
    "a shard not built yet": Case(
        replace(without("seal"), shards=shards(_1=None)), kept=(0,), to_build=(1,), allowed={1: set()}
    ),
    "a record lost beside the seal": Case(
        replace(WHOLE, shards=shards(_1=None)), kept=(0,), to_build=(1,), allowed={1: {DIGESTS[1]}}
    ),
    "a damaged record beside the seal": Case(
        replace(WHOLE, shards=shards(_1=ShardOnDisk(record=DAMAGED))),
        kept=(0,),
        to_build=(1,),
        allowed={1: {DIGESTS[1]}},
        said=["shard 1 is built again: it is damaged"],
    ),
    "a lost file": Case(
        replace(WHOLE, shards=shards(_1=MISSING_FILE)),
        kept=(0,),
        to_build=(1,),
        allowed={1: {DIGESTS[1]}},
        said=["shard 1 is built again: C/f is missing"],
    ),
    "a lost file without a seal": Case(
        replace(without("seal"), shards=shards(_1=MISSING_FILE)),
        kept=(0,),
        to_build=(1,),
        allowed={1: {DIGESTS[1]}},
        said=["shard 1"],
    ),
    "a shard named by hand": Case(
        request=BuildRequest(rebuild=[0]), kept=(1,), to_build=(0,), allowed={0: {DIGESTS[0]}}
    ),
    "a report of this cache": Case(
        request=BuildRequest(
            rebuild=[0],
            report=Report(
                cache="C", level="full", identity=WHOLE.seal.value.identity, shards=2, samples=12, bytes=1, findings=()
            ),
        ),
        kept=(1,),
        to_build=(0,),
    ),
    "a foreign shard": Case(
        replace(WHOLE, shards=shards(_1=FOREIGN.shards[1])),
        kept=(0,),
        to_build=(1,),
        allowed={1: {DIGESTS[1]}},
        said=["commits/000001.json: is not the record that the cache was sealed with"],
    ),
    "a foreign seal": Case(replace(WHOLE, seal=FOREIGN.seal), allowed={0: {DIGESTS[0], FOREIGN_DIGESTS[0]}}),
    "a shard of other texts": Case(
        replace(without("seal"), shards=shards(_1=surveyed(plan=samples(s09="another")).shards[1])),
        kept=(0,),
        to_build=(1,),
        allowed={1: set()},
        said=["commits/000001.json: was made for other samples"],
    ),
    "a lost spec": Case(without("spec"), said=["zarr.json: is missing"]),
    "a lost spec without a seal": Case(without("spec", "seal"), said=["zarr.json"]),
    "a lost spec beside the seal of another recipe": Case(without("spec", survey=OTHER_SEAL), said=["zarr.json"]),
    "a lost spec beside the seal of fewer samples": Case(
        replace(without("spec"), seal=surveyed(plan=samples(range(8))).seal), said=["zarr.json"]
    ),
    "a spec of another recipe than the records": Case(
        with_spec(surveyed(TALLER).spec.value), said=["zarr.json", "zarr.json"]
    ),
    "a spec whose plan digest is damaged": Case(with_spec(WRONG_DIGEST), said=["zarr.json: is not what the spec says"]),
    "the same without a seal": Case(replace(with_spec(WRONG_DIGEST), seal=LOST), said=["zarr.json"]),
    "a lost plan": Case(without("plan"), writes_plan=True, said=["plan.parquet is written again from the source"]),
    "a swapped plan": Case(swapped(), kept=(1,), to_build=(0,), writes_plan=True, said=["plan.parquet is written"]),
    "a plan file that is not the sealed one": Case(
        replace(WHOLE, plan=Reading(plan_on_disk(samples(), WHOLE.spec.value, "other"))),
        writes_plan=True,
        said=["plan.parquet is written"],
    ),
    "a lost spec and plan": Case(without("spec", "plan"), writes_plan=True, said=["zarr.json", "plan.parquet"]),
    "a lost spec, plan and seal": Case(
        without("spec", "plan", "seal"), writes_plan=True, said=["zarr.json", "plan.parquet"]
    ),
    "a lost build record": Case(without("build"), said=["build.json: is missing"]),
    "a damaged seal": Case(replace(WHOLE, seal=DAMAGED), said=["the seal is made again from the records"]),
    "new samples, asked for": Case(
        source=samples(range(20)),
        request=APPEND,
        kept=(0,),
        to_build=(1, 2),
        allowed={0: {DIGESTS[0]}, 1: set(), 2: set()},
        writes_plan=True,
        said=["extending from 12 to 20 samples; shards [0, 1) are full and kept; shard 1, partly filled"],
        rows=20,
    ),
    "new samples that sort first": Case(
        surveyed(plan=samples(range(10, 22))),
        source=samples(range(22)),
        request=APPEND,
        kept=(0,),
        to_build=(1, 2),
        writes_plan=True,
        said=["extending"],
        rows=22,
    ),
    "new samples, left out": Case(
        source=samples(range(20)), request=LEAVE_OUT, said=["8 samples are new in the source"]
    ),
    "an extension that has begun": Case(
        begun(range(20)),
        source=samples(range(20)),
        kept=(0,),
        to_build=(1, 2),
        writes_plan=True,
        said=["extending from 12 to 20 samples"],
        rows=20,
    ),
    "a list that grew again since its extension began": Case(
        begun(range(20)),
        source=samples(range(21)),
        request=APPEND,
        kept=(0,),
        to_build=(1, 2),
        writes_plan=True,
        said=["extending from 12 to 21 samples"],
        rows=21,
    ),
    "an extension that has begun, of the short list": Case(
        begun(range(20)), writes_plan=True, said=["an extension that had only begun is undone"]
    ),
}


@pytest.mark.parametrize("name", DONE)
def test_what_is_kept_and_built(name):
    case = DONE[name]
    work = decided(case)
    assert (sorted(work.kept), work.to_build) == (sorted(case.kept), list(case.to_build))
    assert work.writes_plan is case.writes_plan
    assert work.spec == RECIPE.spec(case.rows, plan_digests(work.plan, PER_SHARD).whole)
    for shard, digests in (case.allowed or {}).items():
        assert work.allowed_digests.get(shard, frozenset()) == digests
    assert len(work.notes) == len(case.said), work.notes
    for note, words in zip(work.notes, case.said, strict=True):
        assert words in note


def decided(case: Case) -> Work:
    source = samples() if case.source is None else case.source
    return decide(case.found, Wanted(samples=source, recipe=case.recipe), case.request)


REFUSED: dict[str, tuple[Case, type[Exception], Sequence[str]]] = {
    "another recipe": (Case(recipe=TALLER), StaleError, ["array.image.height  8", "--cache NEW"]),
    "another recipe, which the seal has": (Case(OTHER_SEAL, recipe=TALLER), StaleError, ["array.image.height  8"]),
    "another recipe, which the seal has, and no spec": (
        Case(without("spec", survey=OTHER_SEAL), recipe=TALLER),
        StaleError,
        ["array.image.height  8"],
    ),
    "records of two recipes": (
        Case(replace(WHOLE, shards=shards(_1=surveyed(TALLER).shards[1]))),
        StaleError,
        ["commits/000000.json", "commits/000001.json", "array.image.height"],
    ),
    "a recipe that nothing holds": (
        Case(replace(without("spec", "seal"), shards={0: ShardOnDisk(record=DAMAGED)})),
        StaleError,
        ["zarr.json", "seal.json", "commits/"],
    ),
    "new samples, not asked for": (Case(source=samples(range(13))), StaleError, ["new sample", "s12", "--extend"]),
    "samples that are gone": (
        Case(source=samples(range(1, 20)), request=APPEND),
        StaleError,
        ["1 gone (s00)", "--cache NEW"],
    ),
    "another text": (Case(source=samples(s09="another")), StaleError, ["image name or text  s09", "--cache NEW"]),
    "another text where the spec is lost": (
        Case(without("spec"), source=samples(s09="another")),
        StaleError,
        ["image name or text  s09", "restore what it was made from and run the same command again"],
    ),
    "new samples where the spec is lost": (
        Case(without("spec"), source=samples(range(13))),
        StaleError,
        ["new sample", "s12", "--extend"],
    ),
    "another text where the plan is lost": (
        Case(without("plan"), source=samples(s09="another")),
        StaleError,
        ["plan.parquet is lost", "samples of shard 1"],
    ),
    "a gone sample where the plan is lost": (
        Case(without("plan"), source=samples(range(1, 12))),
        StaleError,
        ["plan.parquet is lost", "s00"],
    ),
    "another text where spec and plan are lost": (
        Case(without("spec", "plan", "seal"), source=samples(s09="another")),
        StaleError,
        ["samples of shard 1"],
    ),
    "a list that grew again since its extension began": (
        Case(begun(range(20)), source=samples(range(21))),
        StaleError,
        ["--extend"],
    ),
    "a shard that the cache has not": (Case(request=BuildRequest(rebuild=[2])), ConfigError, ["has no shard 2"]),
    "a report of another cache": (
        Case(
            request=BuildRequest(
                report=Report(cache="D", level="full", identity="0" * 64, shards=2, samples=12, bytes=1, findings=())
            )
        ),
        StaleError,
        ["the report is not one of C as it is", "cache-store verify C --level full"],
    ),
    "a record that cannot be read": (
        Case(replace(WHOLE, shards=shards(_1=ShardOnDisk(record=Reading(problem=PermissionError(13, "denied")))))),
        PermissionError,
        ["denied"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_in_which_words(name):
    case, kind, words = REFUSED[name]
    with pytest.raises(kind) as raised:
        decided(case)
    for each in words:
        assert each in str(raised.value)


ENCODER = msgspec.structs.replace(RECIPE.array.encoder, batch_size=3)
OTHER_FIELDS: dict[str, Recipe] = {
    "samples_per_shard": msgspec.structs.replace(RECIPE, samples_per_shard=4),
    "store_format": msgspec.structs.replace(RECIPE, store_format="webdataset"),
    "array.codec": msgspec.structs.replace(RECIPE, array=msgspec.structs.replace(RECIPE.array, codec="zstd")),
    "array.dtype": msgspec.structs.replace(RECIPE, array=msgspec.structs.replace(RECIPE.array, dtype="float32")),
    "array.encoder.batch_size": msgspec.structs.replace(
        RECIPE, array=msgspec.structs.replace(RECIPE.array, encoder=ENCODER)
    ),
}


@pytest.mark.parametrize("field", OTHER_FIELDS)
def test_every_field_of_the_recipe_is_refused_by_name(field):
    with pytest.raises(StaleError, match=f"{field} .*"):
        decided(Case(recipe=OTHER_FIELDS[field]))


def test_recovered_shards_may_come_out_as_anything():
    work = decided(Case()).recovering({1: 2})
    assert work.to_build == [1]
    assert sorted(work.allowed_digests) == [0]
    assert work.samples_differ


def test_an_extension_keeps_the_fingerprints_of_encoded_images():
    grown = samples(range(20)).set_column(4, "fingerprint", pa.array(["now"] * 20))
    work = decided(Case(source=grown, request=APPEND))
    assert work.to_write["fingerprint"].to_pylist() == ["0:0"] * 12 + ["now"] * 8
