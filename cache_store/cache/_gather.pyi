from typing import Any

from numpy.typing import NDArray

def gather(out: NDArray[Any], addresses: NDArray[Any], row_bytes: int, /) -> None: ...
