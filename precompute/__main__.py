"""`python -m precompute`, the same as the console script `precompute`."""

import sys

from cache_store.program.start import start


def main() -> int:
    """Run the program and return its exit code."""
    return start("precompute", "precompute.cli")


if __name__ == "__main__":
    sys.exit(main())
