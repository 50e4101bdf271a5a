"""`python -m cache_store`, the same as the console script `cache-store`."""

import sys

from cache_store.program.start import start


def main() -> int:
    """Run the program and return its exit code."""
    return start("cache-store", "cache_store.cli")


if __name__ == "__main__":
    sys.exit(main())
