"""Opens the caches that training reads: one, joined ones, or views.

Views are caches of one plan that show the same samples flipped or cropped differently; `Permutation.views_at` decides
which view a sample shows at a position of the run.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from cache_store import Cache, JoinedCache, open_joined
from cache_store.cache.joined import refuse_other_plan
from cache_store.errors import ConfigError
from cache_store.format.array import ArrayRecipe
from cache_store.messages import differences_between, refuse
from cache_store.storage.store import Address
from trainer.model.model_config import WORLD, refuse_other_towers

MAY_DIFFER = {
    "image": ("rule", "flip", "max_pixels", "decode"),
    "text": ("caption", "shuffle_tags", "keep_tags"),
    "encoder": ("path", "compiled", "compute_dtype", "batch_size"),
}
"""Fields in which views may differ: they choose the part of the image, or the caption, or only change rounding."""

View = Address | Cache | Mapping[str, Address | Cache]
"""A cache, or a mapping of tower names to caches."""

Caches = Address | Cache | JoinedCache | Mapping[str, Address | Cache] | Sequence[View]
"""A cache, joined caches or views; open, or as paths."""


ReadRows = Callable[[JoinedCache, np.ndarray], Mapping[str, np.ndarray]]


class Views(JoinedCache):
    """Samples are the rows cached in every view; `read` gives the first view."""

    # Axes: N samples asked for.

    def __init__(self, views: Sequence[JoinedCache]) -> None:
        super().__init__(views[0].caches, excluded_rows=np.concatenate([each.rejected_rows() for each in views]))
        self.views = tuple(views)

    def __reduce__(self) -> tuple[object, tuple[object]]:
        return Views, (self.views,)

    @property
    def identity(self) -> str:
        return hashlib.sha256("\n".join(each.identity for each in self.views).encode()).hexdigest()

    def show(
        self, numbers: np.ndarray, views_N: np.ndarray, read: ReadRows = JoinedCache.read_rows
    ) -> dict[str, np.ndarray]:
        """Read every tower's samples by number, [N, *shape], or what else `read` reads, each from its view."""
        rows, shown = self.rows(numbers), dict[str, np.ndarray]()
        for place in np.unique(views_N):
            here = np.flatnonzero(views_N == place)
            for name, samples in read(self.views[place], rows[here]).items():
                if name not in shown:
                    shown[name] = np.empty((len(rows), *samples.shape[1:]), samples.dtype)
                shown[name][here] = samples
        return shown


def open_caches(caches: Caches) -> JoinedCache:
    """Open caches to be read together; a cache alone is named `world`."""
    if isinstance(caches, JoinedCache):
        return caches
    if isinstance(caches, Mapping):
        return open_joined(caches)
    if isinstance(caches, str) or not isinstance(caches, Sequence):
        return open_joined({WORLD: caches})
    return open_views(caches)


def are_named(caches: Caches) -> bool:
    views = [caches] if isinstance(caches, str) or not isinstance(caches, Sequence) else caches
    return any(isinstance(each, JoinedCache | Mapping) for each in views)


def has_moments(cache: JoinedCache) -> bool:
    return any(each.spec.array.encoder.posterior == "moments" for each in cache.caches.values())


def open_views(views: Sequence[View]) -> Views:
    if len(views) < 2:
        raise ConfigError("views: name two caches of one plan, or more")
    named = [each if isinstance(each, Mapping) else {WORLD: each} for each in views]
    refuse_other_towers(named)
    first, *others = map(open_joined, named)
    for other in others:
        if other.identity == first.identity:
            raise ConfigError(
                f"views: {first.first.store} and {other.first.store} hold the same samples, so they are not two views"
            )
        refuse_other_plan(first.first, other.first)
        refuse_unlike_views(first, other)
    return Views([first, *others])


def refuse_unlike_views(first: JoinedCache, other: JoinedCache) -> None:
    """Raise StaleError, with a table, for fields beyond MAY_DIFFER."""
    for name, cache in other.caches.items():
        held = [{name: shared_fields(each.spec.array)} for each in (first.caches[name], cache)]
        if differences := differences_between(*held):
            summary = f"{cache.store} is not a view of the samples of {first.caches[name].store}"
            remedy = (
                "build it with the same encoder and recipe; views may differ in image.flip and image.fit, or in "
                "source.caption, source.shuffle_tags and source.keep_tags"
            )
            refuse(summary, differences, [remedy], held="in the first", now="in the view")


def shared_fields(array: ArrayRecipe) -> dict[str, object]:
    shared: dict[str, object] = {
        name: str(value) for name, value in msgspec.to_builtins(array).items() if name != "codec"
    }
    for section, others in MAY_DIFFER.items():
        fields = msgspec.to_builtins(getattr(array, section))
        if fields is None:
            continue  # texts have no image recipe, and images no text
        shared[section] = {name: str(value) for name, value in fields.items() if name not in others}
    return shared
