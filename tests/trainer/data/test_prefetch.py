import subprocess
import sys
import threading
from contextlib import closing

import pytest

from tests.trainer.runs import ROOT
from trainer.data.prefetch import prefetched


def test_items_come_in_order_and_no_more_are_made_than_asked_for():
    made: list[int] = []
    with closing(prefetched(lambda key: made.append(key) or key, range(100), ahead=2)) as items:
        assert [next(items) for _ in range(3)] == [0, 1, 2]
    assert made == list(range(len(made)))
    assert len(made) <= 5


def test_an_error_surfaces_where_its_item_is_asked_for():
    def load(key: int) -> int:
        if key == 1:
            raise OSError("disk gone")
        return key

    items = prefetched(load, range(3))
    assert next(items) == 0
    with pytest.raises(OSError, match="disk gone"):
        next(items)


def test_leaving_early_leaves_no_thread():
    with closing(prefetched(lambda key: key, range(10))) as items:
        next(items)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


LEFT_OPEN = """
import torch
from trainer.data.prefetch import prefetched

items = torch.items = prefetched(lambda key: key, range(10))  # in a module that outlives the pool's
next(items)
"""


def test_a_generator_left_open_at_exit_says_nothing():
    ended = subprocess.run([sys.executable, "-c", LEFT_OPEN], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")
