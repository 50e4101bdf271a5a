"""`make demo`, or `python -m demo`."""

import os
import sys
from collections.abc import Sequence

from rich.console import Console

from cache_store.errors import Interrupted
from cache_store.program.command_line import parse_config
from cache_store.program.running import run_program
from demo.config import DemoConfig

EXAMPLES = """\
examples:
  python -m demo                                    everything, into demo-run/
  python -m demo --scenes 500 --train_steps 100     quicker, and it learns less
  python -m demo --output /tmp/demo-two --seed 2    other scenes and models

afterwards:
  python -m cache_store info demo-run/cache
  tensorboard --logdir demo-run/train/tensorboard"""


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("demo", run, argv)


def run(argv: Sequence[str]) -> int:
    # torch's threads spin while they wait; where other programs use the cores too, that made small models a hundred
    # times slower. Sleeping costs next to nothing. OpenMP reads this when torch is imported, here and in each child.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    config = parse_config(DemoConfig, argv, "python -m demo", EXAMPLES)
    from demo.walk import walk  # pulls in torch; `--help` stays quick without it

    try:
        walk(config, Console(highlight=False, soft_wrap=True))
    except KeyboardInterrupt:
        raise Interrupted("before the end; the next demo starts over") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
