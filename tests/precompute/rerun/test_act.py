"""What a build deletes before it encodes, by what was decided."""

from dataclasses import replace

import pytest

from cache_store.format.formats import files_of_shard
from precompute.config import BuildConfig, RunConfig
from precompute.rerun.act import encode_job
from precompute.rerun.decide import decide
from precompute.rerun.facts import read_facts
from precompute.rerun.request import BuildRequest
from precompute.rerun.steps import open_inputs


def test_on_ray_files_without_a_record_make_way_and_others_stay(built):
    """Files that are replaced stay until the new ones are whole, as in a repair."""
    pytest.importorskip("ray")
    built.lose("seal.json", "commits/000000.json")
    config = replace(BuildConfig.of_cache(built.cache), run=RunConfig(engine="ray"))
    inputs = open_inputs(config, BuildRequest(rebuild=[1], new_samples="leave out"))
    work = decide(read_facts(inputs), inputs.request)
    job = encode_job(inputs, work, work.to_build, shared=False)
    assert (job.shards, job.new) == ([0, 1], {0})
    there = {shard: [*map(job.store.has, files_of_shard(job.spec, shard))] for shard in range(3)}
    assert (any(there[0]), all(there[1]), all(there[2])) == (False, True, True)
