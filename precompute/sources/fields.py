"""The names of a sample's parts, where a source's own are not the usual ones."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FieldNames:
    """Which part of a sample is what, where the usual names do not fit."""

    image: str | None = None
    """webdataset: the extension of the image, where a sample has several (jpg, seg.png)."""
