"""A build of another recipe is refused, and the table says which field differs."""

import re

import pytest

OTHER_FIELDS = {
    "samples_per_shard": "--store.samples_per_shard 4",
    "store_format": "--store.format webdataset",
    "array.codec": "--store.codec zstd",
    "array.dtype": "--store.dtype float32",
    "array.image.height": "--image.height 40",
    "array.image.width": "--image.width 48",
    "array.image.fit": "--image.fit crop",
    "array.image.resample": "--image.resample lanczos",
    "array.image.range": "--image.range theworld",
    "array.image.decode": "--image.decode reduced",
    "array.image.flip": "--image.flip true",
    "array.image.max_pixels": "--image.max_pixels 9999",
    "array.encoder.path": "--encoder.fold false",
    "array.encoder.posterior": "--encoder.posterior moments",
    "array.encoder.compute_dtype": "--encoder.compute_dtype bfloat16",
    "array.encoder.batch_size": "--encoder.batch_size 4",
}


@pytest.mark.parametrize("field", OTHER_FIELDS)
def test_every_field_of_the_recipe_is_refused_by_name(built, field):
    with built.untouched():
        assert re.search(rf"^  {re.escape(field)}  ", built.do(f"build {OTHER_FIELDS[field]}", code=1), re.MULTILINE)
