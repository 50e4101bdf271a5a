"""Why a sample could not be cached, and when that ends a build."""

from cache_store.errors import EncodeOnceError


class Rejected(Exception):  # noqa: N818 (an outcome of one sample, recorded, never a crash)
    """One sample cannot be cached; `kind` groups such samples in counts, `detail` is for the person."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.reason = str(self)


class TooManyRejectsError(EncodeOnceError):
    """More samples are rejected than the config allows."""
