"""What a rerun does: a table of what was found and asked, and the work or the refusal. No disk is touched."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
from cache_store.format.record import FORMAT_VERSION, signed
from cache_store.format.schema import (
    PLAN_FILE,
    SPEC_FILE,
    BuildRecord,
    CommitContent,
    CommitRecord,
    CommitRun,
    FeatureStatistics,
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
        statistics=FeatureStatistics(count=count * height * width, **sums),
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
        metadata=dict(shard_format(spec).metadata()),
        ids=dict(enumerate(plan["id"].to_pylist())),
    )


def digests_of(survey: Survey) -> dict[int, set[str]]:
    return {shard: {each.content.digest} for shard, each in survey.records.items()}


WHOLE = surveyed()
SPEC = WHOLE.spec.value
FOREIGN = surveyed(content="of another machine")
OTHER_SEAL = replace(WHOLE, seal=surveyed(TALLER).seal)
"""The seal is that of another recipe."""
OTHER_TEXT, OTHER_PLAN = samples(s09="another"), samples(range(10, 22))


def shard_1(on_disk: ShardOnDisk | None, survey: Survey = WHOLE) -> Survey:
    """A survey of a cache in which shard 1 is another, or not there."""
    others = {0: survey.shards[0]}
    return replace(survey, shards=others if on_disk is None else {**others, 1: on_disk})


def without(*names: str, survey: Survey = WHOLE) -> Survey:
    """A survey of a cache that has lost these files."""
    lost = replace(survey, **dict.fromkeys(names, LOST))
    if "spec" in names:
        plan = lost.plan.value and replace(lost.plan.value, digests=None)
        lost = replace(lost, metadata={SPEC_FILE: None}, plan=Reading(plan))
    return lost


def with_spec(spec: Spec) -> Survey:
    return replace(WHOLE, spec=Reading(spec), metadata=dict(shard_format(spec).metadata()))


def with_plan(table: pa.Table, sha256: str = "as written", survey: Survey = WHOLE) -> Survey:
    return replace(survey, plan=Reading(plan_on_disk(table, SPEC, sha256)))


def swapped() -> Survey:
    """A plan of which two samples have each other's image, and an unsealed cache that has not built them."""
    table = samples()
    uris = table["uri"].to_pylist()
    uris[0], uris[1] = uris[1], uris[0]
    unsealed = replace(without("seal"), shards={1: WHOLE.shards[1]})
    return with_plan(table.set_column(2, "uri", pa.array(uris)), survey=unsealed)


def report_of(cache: str, identity: str) -> Report:
    return Report(cache=cache, level="full", identity=identity, shards=2, samples=12, bytes=1, findings=())


BEGUN = with_plan(samples(range(20)))
"""An extension that was killed after its plan was written."""
MISSING_FILE = ShardOnDisk(record=WHOLE.shards[1].record, file_problem="C/f is missing")
DAMAGED_RECORD = ShardOnDisk(record=DAMAGED)
UNREADABLE = ShardOnDisk(record=Reading(problem=PermissionError(13, "denied")))
WRONG_DIGEST = with_spec(msgspec.structs.replace(SPEC, plan_digest="0" * 64))
EITHER = {shard: digests_of(WHOLE)[shard] | digests_of(FOREIGN)[shard] for shard in range(2)}
NOTHING_MORE = BuildRequest()
APPEND, LEAVE_OUT = BuildRequest(new_samples="append"), BuildRequest(new_samples="leave out")
REPORTED = BuildRequest(rebuild=[0], report=report_of("C", WHOLE.seal.value.identity))
REPORTED_ELSEWHERE = BuildRequest(report=report_of("D", "0" * 64))


@dataclass(frozen=True)
class Case:
    """What was found and is asked, and what is done about it."""

    found: Survey = WHOLE
    said: Sequence[str] = ()
    """What each note holds."""
    source: pa.Table = field(default_factory=samples)
    recipe: Recipe = RECIPE
    request: BuildRequest = NOTHING_MORE
    to_build: Sequence[int] = ()
    free: Sequence[int] = ()
    """Shards that may come out as anything."""
    allowed: dict[int, set[str]] = field(default_factory=lambda: digests_of(WHOLE))
    """Digests that the others must have."""
    writes_plan: bool = False
    rows: int | None = None
    """If not those of the source."""


def grown(found: Survey, numbers: range, request: BuildRequest = APPEND, **more: Any) -> Case:
    """An extension to these samples: shard 1 is open."""
    said, source = [f"extending from 12 to {len(numbers)} samples"], samples(numbers)
    return Case(found, said, source, request=request, to_build=(1, 2), free=(1, 2), writes_plan=True, **more)


AGAIN = "shard 1 is built again: "
PLAN = "plan.parquet is written again from the source"
DONE = {
    "a new cache": Case(Survey(store=LocalStore(Path("C"))), to_build=(0, 1), free=(0, 1), writes_plan=True),
    "a finished cache": Case(),
    "a shard not built yet": Case(shard_1(None, without("seal")), to_build=[1], free=[1]),
    "a record lost beside the seal": Case(shard_1(None), to_build=[1]),
    "a damaged record beside the seal": Case(shard_1(DAMAGED_RECORD), [f"{AGAIN}it is damaged"], to_build=[1]),
    "a lost file": Case(shard_1(MISSING_FILE), [f"{AGAIN}C/f is missing"], to_build=[1]),
    "a lost file without a seal": Case(shard_1(MISSING_FILE, without("seal")), [AGAIN], to_build=[1]),
    "a shard named by hand": Case(request=BuildRequest(rebuild=[0]), to_build=[0]),
    "a report of this cache": Case(request=REPORTED, to_build=[0]),
    "a foreign shard": Case(
        shard_1(FOREIGN.shards[1]),
        ["commits/000001.json: is not the record that the cache was sealed with"],
        to_build=[1],
    ),
    "a foreign seal": Case(replace(WHOLE, seal=FOREIGN.seal), allowed=EITHER),
    "a shard of other texts": Case(
        shard_1(surveyed(plan=OTHER_TEXT).shards[1], without("seal")),
        ["commits/000001.json: was made for other samples"],
        to_build=[1],
        free=[1],
    ),
    "a lost spec": Case(without("spec"), ["zarr.json: is missing"]),
    "a lost spec without a seal": Case(without("spec", "seal"), ["zarr.json"]),
    "a lost spec beside the seal of another recipe": Case(without("spec", survey=OTHER_SEAL), ["zarr.json"]),
    "a lost spec beside the seal of fewer samples": Case(
        replace(without("spec"), seal=surveyed(plan=samples(range(8))).seal), ["zarr.json"]
    ),
    "a spec of another recipe than the records": Case(with_spec(surveyed(TALLER).spec.value), ["zarr.json"] * 2),
    "a spec whose plan digest is damaged": Case(WRONG_DIGEST, ["zarr.json: is not what the spec says"]),
    "the same without a seal": Case(without("seal", survey=WRONG_DIGEST), ["zarr.json"]),
    "a lost plan": Case(without("plan"), [PLAN], writes_plan=True),
    "a swapped plan": Case(swapped(), [PLAN], to_build=[0], free=[0], writes_plan=True),
    "a plan file that is not the sealed one": Case(with_plan(samples(), "other"), [PLAN], writes_plan=True),
    "a lost spec and plan": Case(without("spec", "plan"), ["zarr.json", PLAN], writes_plan=True),
    "a lost spec, plan and seal": Case(without("spec", "plan", "seal"), ["zarr.json", PLAN], writes_plan=True),
    "a lost build record": Case(without("build"), ["build.json: is missing"]),
    "a damaged seal": Case(replace(WHOLE, seal=DAMAGED), ["the seal is made again from the records"]),
    "new samples, asked for": grown(WHOLE, range(20)),
    "new samples that sort first": grown(
        surveyed(plan=OTHER_PLAN), range(22), allowed=digests_of(surveyed(plan=OTHER_PLAN))
    ),
    "new samples, left out": Case(
        source=samples(range(20)), request=LEAVE_OUT, said=["8 samples are new in the source"], rows=SAMPLES
    ),
    "an extension that has begun": grown(BEGUN, range(20), NOTHING_MORE),
    "a list that grew again since its extension began": grown(BEGUN, range(21)),
    "a begun extension, of the short list": Case(
        BEGUN, ["an extension that had only begun is undone"], writes_plan=True
    ),
}


@pytest.mark.parametrize("name", DONE)
def test_what_is_kept_and_built(name):
    case = DONE[name]
    work = decided(case)
    assert (sorted(work.kept), work.to_build) == (sorted({0, 1} - {*case.to_build}), list(case.to_build))
    assert work.writes_plan is case.writes_plan
    assert work.spec == RECIPE.spec(case.rows or case.source.num_rows, plan_digests(work.plan, PER_SHARD).whole)
    assert work.allowed_digests == {shard: each for shard, each in case.allowed.items() if shard not in case.free}
    assert len(work.notes) == len(case.said), work.notes
    for note, words in zip(work.notes, case.said, strict=True):
        assert words in note


def decided(case: Case) -> Work:
    return decide(case.found, Wanted(samples=case.source, recipe=case.recipe), case.request)


TALL, NEW_SAMPLE = "array.image.height  8", "new sample                s12"
LOST_PLAN, RESTORE = "plan.parquet is lost", "restore what it was made from and run the same command again"
REFUSED: dict[str, tuple[Case, Sequence[str]]] = {
    "another recipe": (Case(recipe=TALLER), [TALL, "--cache NEW"]),
    "another recipe, which the seal has": (Case(OTHER_SEAL, recipe=TALLER), [TALL]),
    "another recipe, which the seal has, and no spec": (
        Case(without("spec", survey=OTHER_SEAL), recipe=TALLER),
        [TALL],
    ),
    "records of two recipes": (
        Case(shard_1(surveyed(TALLER).shards[1])),
        ["commits/000000.json", "commits/000001.json", "array.image.height"],
    ),
    "a recipe that nothing holds": (
        Case(replace(without("spec", "seal"), shards={0: DAMAGED_RECORD})),
        ["zarr.json", "seal.json", "commits/"],
    ),
    "new samples, not asked for": (Case(source=samples(range(13))), [NEW_SAMPLE, "--extend"]),
    "new samples, no spec": (Case(without("spec"), source=samples(range(13))), [NEW_SAMPLE, "--extend"]),
    "samples that are gone": (Case(source=samples(range(1, 20)), request=APPEND), ["1 gone (s00)", "--cache NEW"]),
    "samples that are gone, no plan": (Case(without("plan"), source=samples(range(1, 12))), [LOST_PLAN, "s00"]),
    "another text": (Case(source=OTHER_TEXT), ["image name or text  s09", "--cache NEW"]),
    "another text, no spec": (Case(without("spec"), source=OTHER_TEXT), ["image name or text  s09", RESTORE]),
    "another text, no plan": (Case(without("plan"), source=OTHER_TEXT), [LOST_PLAN, "samples of shard 1"]),
    "another text, no spec nor plan": (
        Case(without("spec", "plan", "seal"), source=OTHER_TEXT),
        ["samples of shard 1"],
    ),
    "a list that grew again since its extension began": (Case(BEGUN, source=samples(range(21))), ["--extend"]),
    "a report of another cache": (
        Case(request=REPORTED_ELSEWHERE),
        ["the report is not one of C as it is", "cache-store verify C --level full"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_in_which_words(name):
    case, words = REFUSED[name]
    with pytest.raises(StaleError) as raised:
        decided(case)
    for each in words:
        assert each in str(raised.value)


def test_what_is_not_there_or_cannot_be_read_is_no_stale_cache():
    with pytest.raises(ConfigError, match="has no shard 2"):
        decided(Case(request=BuildRequest(rebuild=[2])))
    with pytest.raises(PermissionError, match="denied"):
        decided(Case(shard_1(UNREADABLE)))


def changed_array(**fields: Any) -> Recipe:
    return msgspec.structs.replace(RECIPE, array=msgspec.structs.replace(RECIPE.array, **fields))


OTHER_FIELDS: dict[str, Recipe] = {
    "samples_per_shard": msgspec.structs.replace(RECIPE, samples_per_shard=4),
    "store_format": msgspec.structs.replace(RECIPE, store_format="webdataset"),
    "array.codec": changed_array(codec="zstd"),
    "array.dtype": changed_array(dtype="float32"),
    "array.encoder.batch_size": changed_array(encoder=make_encoder(3, [0.0], [1.0])),
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
