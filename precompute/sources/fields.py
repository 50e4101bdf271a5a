"""The names of a sample's parts, where a source's own are not the usual ones."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FieldNames:
    """Which part of a sample is what, where the usual names do not fit."""

    image: str | None = None
    """webdataset: the extension of the image, where a sample has several (jpg, seg.png). parquet: its column, image or
    img by default, or a format's name."""
    id: str | None = None
    """parquet: the column, id, key or __key__ by default; without one, file and row."""
    caption: str | None = None
    """parquet: the column, caption, text or txt by default; may be absent."""
    conversations: str | None = None
    """parquet: the column, conversations by default; where a row has them, its caption is not used."""
