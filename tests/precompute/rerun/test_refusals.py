"""Errors name the field of the recipe that differs, and commands that fit the one typed."""

import re

import pytest

from precompute.rerun.request import BuildRequest

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


@pytest.mark.parametrize("typed", [["--cache", "r1"], ["--cache=r1"], ["--extend"], []])
def test_a_command_that_is_named_has_no_option_twice(typed):
    request = BuildRequest(command=("precompute", "plan", *typed, "--run.workers", "2"))
    kept = " --extend" if "--extend" in typed else ""
    assert request.with_options("--cache", "NEW") == f"precompute plan{kept} --run.workers 2 --cache NEW"
    assert request.with_options("--extend").count("--extend") == 1
