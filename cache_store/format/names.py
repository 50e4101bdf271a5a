"""Names of a cache's files, relative to its folder. Each shard format names its own shard files."""

SPEC_FILE = "zarr.json"
SPEC_ATTRIBUTE = "encode_once"
PLAN_FILE = "plan.parquet"
SEAL_FILE = "seal.json"
BUILD_FILE = "build.json"
COMMITS = "commits"
SAMPLES = "samples"
ZARR_ARRAY = "latents"
"""Folder of the array in the Zarr form."""


def samples_file(shard: int) -> str:
    return f"{SAMPLES}/{shard:06d}.parquet"


def commit_file(shard: int) -> str:
    return f"{COMMITS}/{shard:06d}.json"
