"""A page on which a person sees what a cache holds: rows drawn, rows that stand out, rows that were rejected."""

from cache_store.gallery.config import GalleryConfig
from cache_store.gallery.gallery import Gallery, make_gallery

__all__ = ["Gallery", "GalleryConfig", "make_gallery"]
