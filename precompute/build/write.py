"""Write and delete the metadata that was decided on, so that a rerun can resume after a kill at any moment.

The plan comes first: from then on, every build continues an extension. The spec is the last: it makes the folder a
cache, or a cache with more rows. Every step is idempotent.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import msgspec

from cache_store.cache.metadata import metadata_of, put_in_force, put_part, put_texts, write_build
from cache_store.format.formats import files_of_shard
from cache_store.format.layout import PLAN, SEAL_FILE, TEXTS, TEXTS_FILE, commit_file, part_file
from cache_store.format.schema import Listed, Spec
from cache_store.storage.store import Store, with_listing
from precompute.build.decide import Work
from precompute.build.inputs import BuildInputs
from precompute.build.planning import PlannedPart, forget_planned
from precompute.build.stated import Planned, Stated


def write_metadata(
    inputs: BuildInputs,
    stated: Stated,
    work: Work,
    rows: Planned,
    added: Sequence[PlannedPart],
    listed: Listed,
    *,
    for_ranks: bool = False,
) -> Work:
    """Write the metadata that is missing, damaged or changed; return the work with the plan on disk.

    `listed` has the versions that were listed. `for_ranks` also deletes the records of shards to replace.
    """
    store, config, spec, survey = inputs.store, inputs.config, work.spec, stated.survey
    parts, texts = {**stated.parts}, {**survey.texts}
    if rows.found and not inputs.request.mends:
        store.delete(SEAL_FILE)  # it names these files; a repair needs it to know what shards were
    for number in rows.found:
        shards = rows.shards(number)
        sizes = [spec.array_of(shard).size.name for shard in spec.part_shards[number]]
        parts[number] = put_part(store, number, [*zip(shards, sizes, strict=True)])
        texts[number] = texts.get(number) or put_texts(store, number, shards)
    planned = [*(parts[number] for number in range(stated.num_parts)), *(each.on_disk for each in added)]
    in_force = [*(texts[number] for number in range(stated.num_parts)), *(each.texts for each in added)]
    assert tuple(each.digests.part for each in planned) == spec.parts
    if dict(enumerate(in_force)) != survey.texts:  # a stopped extension may have left more
        put_in_force(store, in_force, survey.texts_before)
    for name in (TEXTS_FILE, in_force[0].file(0).path, part_file(0)):  # and all beside them
        store.make_durable(name)
    replaced = work.shards_to("replace") if for_ranks else []
    if work.is_extension or replaced:
        store.delete(SEAL_FILE)  # a reader of the longer plan still finds the rows of sealed shards
    for shard in replaced:
        store.delete(commit_file(shard))
    listed = msgspec.structs.replace(listed, plan=tuple(each.file.sha256 for each in planned))
    build = survey.build.value
    if build is None or (build.config, build.listed, build.spec_digest) != (config.recorded(), listed, spec.digest):
        write_build(store, config.recorded(), listed, spec_digest=spec.digest)
    for name, data in metadata_of(spec):
        if survey.metadata.get(name) != data:
            store.put_whole(name, data)
    forget_planned(store)
    return replace(work, plan_files=tuple(each.file for each in planned))


def drop_parts(store: Store, first: int) -> None:
    """Delete the parts from number `first` on, and their texts: their build was refused before it had a spec."""
    for folder in (PLAN, TEXTS):
        for name in store.list(folder):
            number = name.lstrip(".")[:6]
            if name.endswith(".json") or (number.isdecimal() and int(number) >= first):
                store.delete(f"{folder}/{name}")
        if not first:
            store.delete(f"{folder}/")


def delete_shard_files(store: Store, spec: Spec, shards: Collection[int]) -> None:
    there = with_listing(store)
    for name in (name for shard in shards for name in files_of_shard(spec, shard)):
        if there.has(name):
            store.delete(name)
