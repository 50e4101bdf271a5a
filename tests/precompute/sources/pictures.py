"""Numbered pictures with a caption each, as any source may hold them."""

from collections.abc import Sequence

import numpy as np

from cache_store import open_cache
from tests.precompute.conftest import Project, image_bytes


def assert_same_as_of_a_folder(project: Project, order: Sequence[int]) -> None:
    """The cache of these pictures, built three to a shard, holds what one of a folder of the same files holds."""
    folder = project.folder / "folder"
    folder.mkdir()
    for row, number in enumerate(order):
        (folder / f"{row:02d}.png").write_bytes(image_bytes(number))
        (folder / f"{row:02d}.txt").write_text(f"Picture {number}.")
    project.build(name="other", source={"kind": "folder", "path": str(folder)}, store__samples_per_shard=3)
    ours, theirs = open_cache(project.cache), open_cache(project.folder / "other")
    rows, columns = np.arange(len(order)), ["content_sha256", "conversations", "crc32c"]
    assert ours.samples(rows, columns) == theirs.samples(rows, columns)
