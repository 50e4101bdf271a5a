"""The names of a cache's files."""

SPEC_FILE = "zarr.json"
SPEC_ATTRIBUTE = "encode_once"
PLAN = "plan"
"""Folder of the plan: a file for each part."""
TEXTS_FILE = "texts.json"
"""Which texts are in force; the only file of a cache that a change of its texts replaces."""
TEXTS = "texts"
SEAL_FILE = "seal.json"
SHARDS_FILE = "shards.bin"
"""What each shard is, in 64 bytes; the file is written before the seal, which names it."""
REJECTED_FILE = "rejected.parquet"
"""All rejected rows; the file is written before the seal, which names it."""
BUILD_FILE = "build.json"
COMMITS = "commits"
SAMPLES = "samples"
NULL_TEXT_FILE = "null_text.bin"
"""The sample of the null prompt, in a cache of texts; it is a file of the first shard."""
ZARR_ARRAY = "latents"
"""Folder of the arrays in the Zarr form: folders in it, named for their sizes."""


def part_file(part: int) -> str:
    return f"{PLAN}/{part:06d}.parquet"


def planned_file(part: int) -> str:
    """Name the record of a part that is planned; it goes when the spec is written."""
    return f"{PLAN}/{part:06d}.json"


def texts_file(part: int, digest: str) -> str:
    """Name the texts of a part; texts of another digest are another file, so that no reader meets new ones."""
    return f"{TEXTS}/{part:06d}-{digest[:16]}.parquet"


def samples_file(shard: int) -> str:
    return f"{SAMPLES}/{shard:06d}.parquet"


def commit_file(shard: int) -> str:
    return f"{COMMITS}/{shard:06d}.json"
