"""Caches on the Hub: read and verified in place, and never written."""

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cli import main as cache_store
from cache_store.errors import ConfigError
from cache_store.storage.store import open_store
from tests.hub import DATA_SET
from tests.make_cache import make_cache
from tests.named import assert_names


def test_a_cache_on_the_hub_is_read_and_verified_in_place(hub_files, capsys):
    make_cache(hub_files / "cache", np.random.default_rng(0).standard_normal((9, 2, 3, 4), np.float32))
    here, there = open_cache(hub_files / "cache"), open_cache(f"{DATA_SET}/cache")
    numbers = np.array([8, 0, 3])
    assert np.array_equal(here.read(numbers), there.read(numbers))
    assert here.samples(numbers).equals(there.samples(numbers))
    assert cache_store(["verify", f"{DATA_SET}/cache", "--level", "full"]) == 0
    assert cache_store(["copy", str(hub_files / "cache"), f"{DATA_SET}/copy"]) == 2
    assert_names(capsys.readouterr().err, f"OUT: {DATA_SET}/copy")


def test_every_write_to_the_hub_is_refused(hub_files):
    store = open_store(DATA_SET)
    for write in (store.put_whole, store.put_if_absent, lambda name, _: store.delete(name)):
        with pytest.raises(ConfigError, match=f"^{DATA_SET}/file"):
            write("file", b"")
    assert not [*hub_files.iterdir()]


def test_an_address_without_a_data_set_is_told_from_a_failing_network(hub_files):
    for name, error, said in (
        ("me", ConfigError, "hf://datasets/OWNER/NAME/"),
        ("me/pictures@", ConfigError, "hf://datasets/OWNER/NAME/"),
        ("me/others", OSError, "^((?!network).)*$"),
        ("me/portal", OSError, "network.*HF_TOKEN"),
    ):
        with pytest.raises(error, match=said) as caught:
            [*open_store(f"hf://datasets/{name}").walk()]
        assert "\n" not in str(caught.value)
