from typing import Any

from numpy.typing import NDArray

def add_batch(
    kind: int,
    layout: tuple[int, int, int],
    cells: tuple[int, int],
    stored: NDArray[Any],
    samples: NDArray[Any] | None,
    kept: NDArray[Any],
    totals: NDArray[Any],
    rgb: NDArray[Any] | None,
    gram: NDArray[Any] | None,
    moment: NDArray[Any] | None,
    checksums: NDArray[Any] | None,
    /,
) -> None: ...
