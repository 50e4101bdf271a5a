"""What a cache of latents is: its records, its bytes, how to read and verify it. Needs no torch."""

from cache_store.cache.joined import JoinedCache, open_joined
from cache_store.cache.reader import Cache, open_cache
from cache_store.errors import CacheError, EncodeOnceError

__all__ = ["Cache", "CacheError", "EncodeOnceError", "JoinedCache", "open_cache", "open_joined"]
