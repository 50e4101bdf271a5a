import threading
from contextlib import closing

import pytest

from trainer.prefetch import prefetched


def test_items_come_in_order_and_no_more_are_made_than_asked_for() -> None:
    made: list[int] = []
    with closing(prefetched(lambda key: made.append(key) or key, range(100), ahead=2)) as items:
        assert [next(items) for _ in range(3)] == [0, 1, 2]
    assert made == list(range(len(made)))
    assert len(made) <= 5


def test_an_error_surfaces_where_its_item_is_asked_for() -> None:
    def load(key: int) -> int:
        if key == 1:
            raise OSError("disk gone")
        return key

    items = prefetched(load, range(3))
    assert next(items) == 0
    with pytest.raises(OSError, match="disk gone"):
        next(items)


def test_leaving_early_leaves_no_thread() -> None:
    before = threading.active_count()
    with closing(prefetched(lambda key: key, range(10))) as items:
        next(items)
    assert threading.active_count() == before
