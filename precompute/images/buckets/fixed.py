"""Rules that give all images the one size that is listed."""

from cache_store.format.array import Size, SizeRule
from precompute.images.buckets.placement import Placement, Sides, cut_first, keep_middle


def place_squash(rule: SizeRule, size: Sides) -> Placement:
    """Scale both sides, whatever the aspect."""
    ((width, height),) = rule.sizes
    return Placement(Size(1, height, width), (width, height), (0, 0))


def place_crop(rule: SizeRule, size: Sides) -> Placement:
    """Keep the middle, with the target's aspect, as Pillow's `ImageOps.fit` does."""
    (target,) = rule.sizes
    return cut_first(size, target)


def place_pad(rule: SizeRule, size: Sides) -> Placement:
    """Scale the whole image to fit inside, as Pillow's `ImageOps.contain`, between the borders of `ImageOps.pad`."""
    ((across, down),), (width, height) = rule.sizes, size
    columns = round(width / height * down) if width / height < across / down else across
    rows = round(height / width * across) if width / height > across / down else down
    crop = -round((across - columns) * 0.5), -round((down - rows) * 0.5)
    return Placement(Size(1, down, across), (columns, rows), crop)


def place_edge(rule: SizeRule, size: Sides) -> Placement:
    """Scale the shorter side to the rule's resolution, as transformers' image processors do, and keep the middle."""
    (target,), side = rule.sizes, rule.resolution
    longer = int(side * max(size) / min(size))
    return keep_middle(target, (side, longer) if size[0] <= size[1] else (longer, side))
