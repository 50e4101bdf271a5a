"""A cache planned from another cache's plan."""

import shutil

import numpy as np
import pytest

from cache_store import open_cache, open_joined
from precompute.cli import main
from tests.precompute.conftest import config_values, write_config, write_source


@pytest.fixture
def first(tmp_path, source_path, vae_path):
    """A cache that was extended, so that its rows are not in the order of ids."""
    write_source(source_path, [3, 9, 17, 20, 21])
    run(tmp_path, config_values(tmp_path / "first", source_path, vae_path))
    write_source(source_path)
    run(tmp_path, config_values(tmp_path / "first", source_path, vae_path), "--extend")
    return tmp_path / "first"


def run(folder, values, *flags, code=0):
    assert main(["build", "--config", str(write_config(folder / "build.yaml", values)), *flags]) == code


def second_values(folder, first, vae_path, **overrides):
    """Of another size and another number of samples a shard."""
    values = config_values(folder / "second", folder / "source", vae_path, **overrides)
    image, store = {"height": 24, "width": 24}, {"samples_per_shard": 5, "format": "webdataset"}
    return {**values, "image": image, "store": store, "source": {"kind": "cache", "path": str(first)}}


def test_a_cache_of_another_caches_plan_joins_it_by_row(tmp_path, first, vae_path):
    run(tmp_path, second_values(tmp_path, first, vae_path))
    joined = open_joined({"first": first, "second": tmp_path / "second"})
    numbers = np.arange(len(joined))
    ids = [
        open_cache(first).samples(numbers, ["row", "id"]),
        open_cache(tmp_path / "second").samples(numbers, ["row", "id"]),
    ]
    assert len(joined) == 20
    assert ids[0] == ids[1] == joined.samples(numbers, ["row", "id"])
    assert joined.read(numbers)["second"].shape == (20, 16, 3, 3)


def test_such_a_cache_is_as_one_built_from_the_images(tmp_path, source_path, vae_path):
    """Where the first was never extended; all but what remembers the source is the same."""
    run(tmp_path, config_values(tmp_path / "first", source_path, vae_path))
    values = config_values(tmp_path / "second", source_path, vae_path)
    run(tmp_path, {**values, "source": {"kind": "cache", "path": str(tmp_path / "first")}})
    assert open_cache(tmp_path / "second").identity == open_cache(tmp_path / "first").identity


def test_the_second_cache_grows_with_the_first(tmp_path, source_path, vae_path):
    write_source(source_path, list(range(9)))
    run(tmp_path, config_values(tmp_path / "first", source_path, vae_path, run__max_reject_fraction=0.5))
    values = second_values(tmp_path, tmp_path / "first", vae_path, run__max_reject_fraction=0.5)
    run(tmp_path, values)
    write_source(source_path)
    run(tmp_path, config_values(tmp_path / "first", source_path, vae_path), "--extend")
    run(tmp_path, values, code=1)
    run(tmp_path, values, "--extend")
    assert len(open_joined({"a": tmp_path / "first", "b": tmp_path / "second"})) == 20


def test_the_second_cache_is_repaired_from_the_images_of_the_first(tmp_path, first, vae_path):
    run(tmp_path, second_values(tmp_path, first, vae_path))
    before = open_cache(tmp_path / "second").identity
    (tmp_path / "second" / "shards" / "000001.tar").unlink()
    assert main(["repair", str(tmp_path / "second"), "--shards", "1"]) == 0
    assert open_cache(tmp_path / "second").identity == before


@pytest.mark.parametrize(
    ("source", "said", "code"),
    [
        ({"path": "absent"}, "does not exist", 2),
        ({"path": "empty"}, "holds no cache", 2),
        ({"path": "second"}, "is the cache itself", 2),
        ({"path": "first", "images": "first"}, "the other cache remembers its images", 2),
    ],
)
def test_what_is_no_other_cache_is_refused_in_a_line(tmp_path, first, vae_path, capsys, source, said, code):
    (tmp_path / "empty").mkdir()
    given = {name: str(tmp_path / value) for name, value in source.items()}
    run(tmp_path, {**second_values(tmp_path, first, vae_path), "source": {"kind": "cache", **given}}, code=code)
    errors = capsys.readouterr().err.splitlines()
    assert said in errors[-1]
    assert not (tmp_path / "second").exists()


def test_a_damaged_plan_of_the_other_cache_is_refused(tmp_path, first, vae_path, capsys):
    write_source(tmp_path / "elsewhere", [1, 2, 3, 5, 6])
    run(tmp_path, config_values(tmp_path / "other", tmp_path / "elsewhere", vae_path))
    shutil.copy(tmp_path / "other" / "plan.parquet", first)
    capsys.readouterr()
    run(tmp_path, second_values(tmp_path, first, vae_path), code=1)
    assert "plan.parquet is damaged" in capsys.readouterr().err
