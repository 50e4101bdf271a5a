"""Carry out what was decided: every write and delete of a build, so that a rerun can resume after a kill at any moment.

The plan comes first: from then on, every build continues an extension. The spec is the last of the metadata: it
makes the folder a cache, or a cache with more rows. Then come the shards, and at last the seal. Every step is
idempotent.
"""

from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import msgspec

from cache_store.cache.commit import retract, sum_up, write_seal
from cache_store.cache.metadata import (
    metadata_of,
    put_in_force,
    put_part,
    put_texts,
    write_build,
)
from cache_store.errors import Interrupted
from cache_store.format.formats import files_of_shard
from cache_store.format.layout import (
    PLAN,
    SEAL_FILE,
    TEXTS,
    TEXTS_FILE,
    commit_file,
    part_file,
)
from cache_store.format.schema import Listed, Seal, Spec
from cache_store.log import log_info
from cache_store.program.running import stop_on_signals
from cache_store.storage.store import Store, with_listing
from cache_store.verify.verify import clear_leftovers
from precompute.build.decide import Work
from precompute.build.inputs import BuildInputs
from precompute.build.planning import PlannedPart, forget_planned
from precompute.build.refusals import refuse_mismatched_shards
from precompute.build.stated import Planned, Stated
from precompute.encode.job import EncodeJob
from precompute.encode.launchers import run_workers
from precompute.encode.progress import BuildProgress, Encoded
from precompute.encode.rejects import refuse_rejected
from precompute.images.rejected import CONTINUE, TooManyRejectsError


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a build: its seal and its counts."""

    seal: Seal
    encoded: Encoded
    num_retried: int
    """Rejected samples that were tried again."""
    recovered: int
    """Retried samples that are cached now."""


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

    `listed` has the versions that were listed. `for_ranks`, which replace no file, it also deletes the records of
    shards to replace.
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
        retract(store, shard)
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


def build_shards(inputs: BuildInputs, work: Work, shards: Sequence[int], *, shared: bool = False) -> BuildProgress:
    """Build these shards, alone or (`shared`) beside other ranks, which replace none; return the progress."""
    spec, store, limit = work.spec, inputs.store, inputs.config.run.max_reject_fraction
    retry = inputs.request.with_options("--retry-rejected")
    counted = BuildProgress(
        spec.rows,
        work.kept.values(),
        limit,
        to_build=sum(len(spec.shard_rows(shard)) for shard in shards),
        shared=shared,
        made_of=spec.array.made_of,
        compute_dtype=spec.array.encoder.compute_dtype,
    )
    with closing(counted) as progress:
        try:
            progress.refuse_too_many_rejects()
            if shards:
                # Keep the seal while shards must match its digests, so that an interrupted repair loses nothing.
                if not shared and not all(task.allowed for task in work.tasks.values()):
                    store.delete(SEAL_FILE)
                encode(inputs, encode_job(inputs, work, shards, shared), progress)
        except TooManyRejectsError as error:
            refuse_rejected(str(error), store, spec, retry, CONTINUE)
    if progress.is_all_rejected:
        none = f"{store}: none of {spec.rows:,} samples could be cached, so there is nothing to seal"
        refuse_rejected(none, store, spec, retry)
    return progress


def encode_job(inputs: BuildInputs, work: Work, shards: Sequence[int], shared: bool) -> EncodeJob:
    """Make the workers' job.

    No file of a new shard is replaced where another program may be writing it: in a store that no claim guards, and on
    Ray, where a lost node may still be at work; there, files without a record are deleted first.
    """
    store, on_ray = inputs.store, inputs.config.run.engine == "ray" and not shared
    new = frozenset(work.shards_to("build") if on_ray or not store.has_exclusive_claims else ())
    if store.has_exclusive_claims:
        delete_shard_files(store, work.spec, new)
    return EncodeJob(
        config=inputs.config,
        store=store,
        spec=work.spec,
        shards=shards,
        allowed_digests=work.allowed_digests,
        shared=shared,
        never_replace=new,
    )


def encode(inputs: BuildInputs, job: EncodeJob, progress: BuildProgress) -> None:
    """Build the job's shards; raise StaleError if one has the wrong bytes, Interrupted after a signal."""
    is_here = inputs.config.run.engine != "ray"
    if is_here and (inputs.config.encoder.device, inputs.encoder.device.type) == ("auto", "cpu"):
        log_info("encoder.device auto: no GPU that torch can use was found; the CPU encodes")
    with stop_on_signals() as stop:
        run_workers(job, inputs.source, inputs.encoder, progress)
    refuse_mismatched_shards(job.store, progress.mismatched, job.allowed_digests, inputs.request)
    if stop.is_set() and not job.shared:  # the signal came after the last batch
        raise Interrupted("every shard is committed; run the same command again to seal the cache")


def seal_cache(store: Store, work: Work, progress: BuildProgress) -> Summary:
    """Delete leftovers of dead builds and seal the cache; every shard must be committed."""
    clear_leftovers(store, work.spec)
    records = {**work.kept, **progress.built}
    contents = [records[shard].content for shard in range(work.spec.num_shards)]
    store.make_durable(commit_file(0))  # and so all other records
    made = sum_up(store, work.spec, contents, work.plan_files, work.earlier_seal if work.is_rolled_up else None)
    seal = write_seal(store, made, work.earlier_seal)
    if work.earlier_seal is not None and work.earlier_seal.identity != seal.identity:
        is_asked = work.has_other_samples
        why = "its samples changed; restart training" if is_asked else "the old seal did not match these shards"
        log_info(f"the cache's identity was {work.earlier_seal.identity} and is {seal.identity}: {why}")
    retried = [(task.rejected, progress.built[shard]) for shard, task in work.tasks.items() if task.rejected]
    recovered = sum(before - record.content.rejected for before, record in retried)
    return Summary(seal=seal, encoded=progress.encoded, num_retried=work.num_retried, recovered=recovered)
