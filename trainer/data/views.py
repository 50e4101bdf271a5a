"""Views: caches of one plan that show the same samples otherwise, cropped or flipped, and are read one view at a time.

Which one a sample shows at a position of the run is for the order to say (`SampleOrder.views_at`).
"""

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from cache_store import Cache, JoinedCache, open_joined
from cache_store.cache.joined import refuse_other_plan
from cache_store.errors import ConfigError
from cache_store.format.array import ArraySpec
from cache_store.refusal import differences_between, refuse
from cache_store.storage.store import Address
from trainer.model.config import WORLD, refuse_other_towers

MAY_DIFFER = {
    "image": ("fit", "flip", "max_pixels", "decode"),
    "encoder": ("path", "compiled", "compute_dtype", "batch_size"),
}
"""What views may have been made by in their own ways: the part of the image that is seen, and what only rounds."""

View = Address | Cache | Mapping[str, Address | Cache]
"""A cache, or each tower's, by its name."""


class Views(JoinedCache):
    """Several views of each sample; samples are the rows cached in every view, and `read` gives the first view."""

    # Axes: N samples asked for.

    def __init__(self, views: Sequence[JoinedCache]) -> None:
        super().__init__(views[0].caches, excluded_rows=np.concatenate([each.rejected_rows() for each in views]))
        self.views = tuple(views)

    def __repr__(self) -> str:
        return f"Views({', '.join(map(repr, self.views))})"

    def __reduce__(self) -> tuple[object, tuple[object]]:
        return Views, (self.views,)

    @property
    def identity(self) -> str:
        """SHA-256 over the views' identities, in their order."""
        return hashlib.sha256("\n".join(each.identity for each in self.views).encode()).hexdigest()

    def show(self, numbers: np.ndarray, views_N: np.ndarray) -> dict[str, np.ndarray]:
        """Every tower's samples by number, each in the view of that place in `views`: [N, *shape]."""
        rows = self.rows(numbers)
        arrays = {name: each.spec.array for name, each in self.caches.items()}
        shown = {name: np.empty((len(rows), *each.shape), each.numpy_dtype) for name, each in arrays.items()}
        for place, view in enumerate(self.views):
            here = np.flatnonzero(views_N == place)
            for name, samples in view.read_rows(rows[here]).items():
                shown[name][here] = samples
        return shown


def open_views(views: Sequence[View]) -> Views:
    """Open two views or more.

    Raises what `open_joined` raises, and StaleError, with a table, where two are not of one plan or hold other samples.
    """
    if len(views) < 2:
        raise ConfigError("views: name two caches of one plan, or more")
    named = [each if isinstance(each, Mapping) else {WORLD: each} for each in views]
    refuse_other_towers(named)
    first, *others = map(open_joined, named)
    for other in others:
        if other.identity == first.identity:
            raise ConfigError(f"views: {first.first.store} and {other.first.store} hold the same samples: no two views")
        refuse_other_plan(first.first, other.first)
        refuse_other_samples(first, other)
    return Views([first, *others])


def refuse_other_samples(first: JoinedCache, other: JoinedCache) -> None:
    """Raise StaleError where what one reads of a view is not to be read of the other."""
    held = [{name: what_views_share(each.spec.array) for name, each in view.caches.items()} for view in (first, other)]
    if differences := differences_between(*held):
        summary = f"{other.first.store} is no view of the samples of {first.first.store}"
        remedy = "build it with the same encoder and image recipe, but for image.flip and image.fit"
        refuse(summary, differences, [remedy], held="in the first", now="in the view")


def what_views_share(array: ArraySpec) -> dict[str, object]:
    shared: dict[str, object] = {
        name: str(value) for name, value in msgspec.to_builtins(array).items() if name != "codec"
    }
    for section, others in MAY_DIFFER.items():
        fields = msgspec.to_builtins(getattr(array, section))
        if fields is None:
            continue  # of texts, which have no image recipe
        shared[section] = {name: str(value) for name, value in fields.items() if name not in others}
    return shared
