"""The names of a cache's files."""

SPEC_FILE = "zarr.json"
SPEC_ATTRIBUTE = "encode_once"
PLAN_FILE = "plan.parquet"
SEAL_FILE = "seal.json"
REJECTED_FILE = "rejected.parquet"
"""All rejected rows; the file is written before the seal, which names it."""
BUILD_FILE = "build.json"
COMMITS = "commits"
SAMPLES = "samples"
SIZES = "image_sizes"
"""Folder of image sizes that a planning has read so far; it is deleted once the plan is there."""
NULL_TEXT_FILE = "null_text.bin"
"""The sample of the null prompt, in a cache of texts; it is a file of the first shard."""
ZARR_ARRAY = "latents"
"""Folder of the arrays in the Zarr form: folders in it, named for their sizes."""


def samples_file(shard: int) -> str:
    return f"{SAMPLES}/{shard:06d}.parquet"


def commit_file(shard: int) -> str:
    return f"{COMMITS}/{shard:06d}.json"
