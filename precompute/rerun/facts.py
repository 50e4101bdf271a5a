"""Read everything that a build has to know, once: the cache, the source's list, and how the two lists fit together.

Nothing is judged here: `decide` does that, without a disk. Images are compared later, by `compare_images`, because the
decision says which ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from cache_store.cache.survey import PlanOnDisk, Reading, Survey, survey, survey_without_reading_plan
from cache_store.errors import ConfigError
from cache_store.format.array import ArrayRecipe, SampleAxes, Size
from cache_store.format.plan import texts_digest
from cache_store.format.record import FORMAT_VERSION
from cache_store.format.schema import BuildRecord, Recipe, SizedArray, Spec
from cache_store.format.tables import TEXTS_SCHEMA
from cache_store.storage.store import Store
from precompute.config import BuildConfig
from precompute.inputs import Reader, make_reader
from precompute.rerun.arrange import Arranger, BySize, OneSize, Order
from precompute.rerun.file_sizes import FileSizes
from precompute.rerun.match_rows import NO_DIFFERENCE, PlanDifference, compare_plans, reorder_by_ids
from precompute.rerun.request import BuildRequest
from precompute.rerun.rows import Cut, ListedRows, Rows, cut_like, cut_rows, ids_where, rows_on_disk
from precompute.rerun.source_plan import list_source
from precompute.sources.images import Source

if TYPE_CHECKING:
    from precompute.encoders.encoder import Encoder  # with torch, which no decision needs


ORDERS: dict[str, Order] = {"cache": "plan", "parquet": "source"}
"""The order of rows by kind of source; a row group of a Parquet file is read whole, so its rows stay together."""


ArrayOf = Callable[[str], SizedArray]
"""Describes the array of a name."""


@dataclass(frozen=True, kw_only=True)
class BuildInputs:
    """One build's config and request, with its opened store, source and encoder."""

    config: BuildConfig
    request: BuildRequest
    store: Store
    source: Source
    encoder: "Encoder"

    @property
    def recipe(self) -> Recipe:
        return recipe_of(self.config, self.encoder)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The state of a cache on disk, and of the source that it is built from."""

    survey: Survey
    recipe: Recipe
    """The recipe that config and encoder ask for."""
    found: Rows | None
    """The source's samples, in the cache's rows as far as it has them; None if ranks find no whole plan, and if the
    source does not have the planned samples."""
    num_listed: int = 0
    """Number of the source's samples, whatever they are."""
    planned: Rows | None = None
    """The samples that the cache was planned with; None for a new cache, and if they are lost."""
    difference: PlanDifference = NO_DIFFERENCE
    """How `found` differs from `planned`."""
    num_other_texts: int = 0
    """Parts whose texts in the source are not those in force."""
    source_version: str | None = None
    """The source's version from before the listing; None if every build must list it."""
    note: str = ""
    """Note on the source's other files; empty if this run did not list the source. Likewise `warnings`."""
    warnings: Sequence[str] = ()
    free_bytes: int | None = None
    """Bytes free at the cache's place; None if unknown."""


def recipe_of(config: BuildConfig, encoder: "Encoder") -> Recipe:
    layout, *_ = [encoder.array(size) for size in config.example_sizes]  # all must be possible
    if config.store.dtype == "uint8" and not layout.can_be_quantized:
        raise ConfigError(
            f"store.dtype uint8: it is for channels of many values each, but a sample of {config.encoder.model} is "
            f"[{layout.named(layout.shape)}]; take float16"
        )
    array = ArrayRecipe(
        **{name: getattr(layout, name) for name in SampleAxes.__struct_fields__},
        features=layout.num_features,
        dtype=config.store.dtype,
        codec=config.store.codec,
        image=config.image_recipe,
        text=config.source.recipe(encoder.texts.recipe) if encoder.texts else None,
        encoder=encoder.identity,
    )
    return Recipe(
        format_version=FORMAT_VERSION,
        store_format=config.store.format,
        samples_per_shard=config.store.samples_per_shard,
        array=array,
    )


def make_arranger(
    config: BuildConfig, recipe: Recipe, reader: Reader, encoder: "Encoder", store: Store | None = None
) -> Arranger:
    """Make what sorts samples by size; sizes that are read are kept in the store, if one is given."""
    array_of = partial(sized_array, encoder)
    if len(sizes := config.example_sizes) == 1:
        return OneSize(array_of(sizes[0]), recipe.samples_per_shard, config.store.rows_per_part)
    order, image = ORDERS.get(config.source.kind, "aspect"), recipe.array.images
    sizes_of, rows = FileSizes(reader, image.digest, store), (recipe.samples_per_shard, config.store.rows_per_part)
    return BySize(image.rule, *rows, sizes_of, array_of, order)


def sized_array(encoder: "Encoder", size: Size) -> SizedArray:
    return SizedArray(size=size, shape=encoder.array(size).shape)


def known_arrays(surveyed: Survey, encoder: "Encoder") -> ArrayOf:
    """Describe the array of a name: as the cache's specs state it, else as the encoder does."""
    stated = {each.size.name: each for spec in stated_specs(surveyed) for each in spec.arrays}
    return lambda name: stated.get(name) or sized_array(encoder, Size.of_name(name))


def read_facts(inputs: BuildInputs, build: Reading[BuildRecord]) -> Facts:
    """Read the cache, and list the source unless the cache's plan still is its list; `build` was read before.

    Listing takes as long as planning, while that check only looks at each source file and each cache record.
    """
    config, store, version = inputs.config, inputs.store, inputs.source.version()
    is_unchanged = not inputs.request.has_extra_work and is_source_unchanged(build.value, config, version)
    surveyed = survey(store, build)
    array_of, recipe = known_arrays(surveyed, inputs.encoder), inputs.recipe
    if is_unchanged and (rows := unchanged_rows(surveyed, array_of)):
        facts = Facts(survey=surveyed, recipe=recipe, found=rows, planned=rows, num_listed=len(rows))
    else:
        texts, threads, held = inputs.encoder.texts, config.run.threads(1), surveyed.plan.value
        reader = make_reader(inputs.source, recipe.array, texts, clips=config.clip, threads=threads)
        has_same_clips = build.value is not None and build.value.config.get("clip") == config.recorded()["clip"]
        planned = held.plan if held else None
        listed = list_source(inputs.source, reader, config, planned, has_same_clips=has_same_clips)
        arranger = make_arranger(config, recipe, reader, inputs.encoder, store)
        grows = inputs.request.new_samples == "append"
        facts = compare_lists(surveyed, recipe, listed.rows, array_of, arranger, grows=grows)
        facts = replace(facts, note=listed.note, warnings=listed.warnings)
        version = None if listed.num_missing else version  # each build checks again how many may be missing
    return replace(facts, source_version=version, free_bytes=store.free_bytes())


def read_planned_facts(inputs: BuildInputs, *, as_stated: bool = False) -> Facts:
    """Read the cache for ranks, or for the seal after them: the plan on disk counts, whatever the source has now.

    A rank takes the plan's rows `as_stated` by the records, and reads only those of its own shards.
    """
    surveyed = (survey_without_reading_plan if as_stated else survey)(inputs.store)
    return planned_facts(surveyed, inputs.recipe, known_arrays(surveyed, inputs.encoder))


def planned_facts(surveyed: Survey, recipe: Recipe, array_of: ArrayOf) -> Facts:
    spec, plan = surveyed.spec.value, surveyed.plan.value
    if spec is None or plan is None or not is_plan_of(plan, spec):
        return Facts(survey=surveyed, recipe=recipe, found=None)
    rows = rows_on_disk(plan.plan, plan.digests, array_of)
    return Facts(survey=surveyed, recipe=recipe, found=rows, planned=rows, num_listed=len(rows))


def is_source_unchanged(build: BuildRecord | None, config: BuildConfig, source_version: str | None) -> bool:
    """Return whether the cache was planned with this config and no source file was written, added or removed since."""
    listed = build and build.listed
    is_same = build and listed and listed.source == source_version and build.config == config.recorded()
    return source_version is not None and bool(is_same)


def unchanged_rows(surveyed: Survey, array_of: ArrayOf) -> Rows | None:
    """Return the plan's rows; None if plan, texts, spec or seal is lost, damaged or replaced since the listing."""
    spec, plan, seal, build = surveyed.spec.value, surveyed.plan.value, surveyed.seal.value, surveyed.build.value
    if spec is None or plan is None or build is None or (listed := build.listed) is None:
        return None
    if tuple(file.sha256 for file in plan.files) != listed.plan or not is_plan_of(plan, spec):
        return None
    if (seal and seal.plan_files != plan.files) or not has_recipe(surveyed, spec.recipe):
        return None
    if len(surveyed.texts) < len(spec.parts):
        return None
    return rows_on_disk(plan.plan, plan.digests, array_of)


def compare_lists(
    surveyed: Survey, recipe: Recipe, listed: ListedRows, array_of: ArrayOf, arranger: Arranger, *, grows: bool
) -> Facts:
    """Find the samples that the cache was planned with, and put the source's samples into its rows.

    The `arranger` sorts the samples of a new cache by size, and if the cache `grows`, the new ones. A cache of another
    recipe is refused anyway, so its lists are not compared.
    """
    facts = Facts(survey=surveyed, recipe=recipe, found=None, num_listed=len(listed))
    if not surveyed.has_cache:
        return replace(facts, found=arranger.arrange_new(listed))
    if not has_recipe(surveyed, recipe):
        return facts
    planned = planned_rows(surveyed, recipe, listed, array_of, arranger)
    if planned is None:
        return facts
    found = cut_like(listed, planned)
    if found is None:
        listed = reorder_by_ids(listed, planned.id_hashes(), recipe.samples_per_shard)
        found = cut_like(listed, planned)
    if found is None or np.greater(found.digests.withdrawn, planned.digests.withdrawn).any():
        return replace(facts, planned=planned, difference=compare_plans(planned, listed))
    if grows and len(listed) > len(planned):
        found = arranger.arrange_added(planned, listed)
    added = ids_where(listed, listed.bounds, np.arange(len(listed)) >= len(planned))
    difference = PlanDifference(added=added)
    held = [(part, texts) for part, texts in surveyed.texts.items() if part < len(planned.cut.parts)]
    others = sum(texts.digest != texts_of(found, part) for part, texts in held) if found else 0
    return replace(facts, found=found, planned=planned, difference=difference, num_other_texts=others)


def texts_of(found: Rows, part: int) -> str:
    """Return the digest of the texts of a part as the source has them."""
    names = ["id", *TEXTS_SCHEMA.names, *found.plan.extra]
    return texts_digest(pa.concat_tables([found.shard(shard, names) for shard in found.cut.shards_of(part)]))


def has_recipe(surveyed: Survey, recipe: Recipe) -> bool:
    """Return whether the cache was made with this recipe, by all its records, or else its spec, or else its seal."""
    held = [record.content.recipe for record in surveyed.records.values()]
    stated = [spec.recipe for spec in stated_specs(surveyed)]
    return all(each == recipe for each in held) if held else stated[:1] == [recipe]


def stated_specs(surveyed: Survey) -> list[Spec]:
    """List the specs that the cache states: its own, and the sealed one."""
    sealed = surveyed.seal.value and surveyed.seal.value.spec
    return [spec for spec in (surveyed.spec.value, sealed) if spec]


def planned_rows(
    surveyed: Survey, recipe: Recipe, listed: ListedRows, array_of: ArrayOf, arranger: Arranger
) -> Rows | None:
    """Find the rows that the cache was planned with: those of its plan, or of the source if they are equal.

    The spec and the seal say which rows those are, or else all records do. None if neither list has them.
    """
    plan, stated = surveyed.plan.value, [spec for spec in stated_specs(surveyed) if spec.recipe == recipe]
    if plan and (any(is_plan_of(plan, spec) for spec in stated) or (not stated and fits_records(surveyed, plan))):
        return rows_on_disk(plan.plan, plan.digests, array_of)
    for spec in stated:
        if len(listed) == spec.rows:
            found = cut_rows(arranger.arrange_new(listed).plan, Cut.of(spec))
            if found.digests.parts == spec.parts:
                return found
    return None


def is_plan_of(plan: PlanOnDisk, spec: Spec) -> bool:
    """Return whether the plan has the rows of the spec, cut into the same shards."""
    return plan.digests.parts == spec.parts and plan.plan.is_cut_as(spec)


def fits_records(surveyed: Survey, plan: PlanOnDisk) -> bool:
    """Return whether every record was made for the plan's rows."""
    contents = [record.content for record in surveyed.records.values()]
    shards = plan.digests.shards
    return bool(contents) and all(each.shard < len(shards) and each.samples == shards[each.shard] for each in contents)
