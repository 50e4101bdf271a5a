"""`python -m trainer`, the same as the console script `trainer`."""

import sys

from cache_store.program.start import start


def main() -> int:
    return start("trainer", "trainer.cli")


if __name__ == "__main__":
    sys.exit(main())
