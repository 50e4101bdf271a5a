"""The start of a program's process. Imports little, so that Ctrl-C prints no traceback from its first moment."""

import signal
from collections.abc import Callable
from importlib import import_module
from types import ModuleType


def start(program: str, module: str, load: Callable[[str], ModuleType] = import_module) -> int:
    """Run `PROGRAM` of `module` with the arguments of the command line; then only the process's end is left."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the program listens
    from cache_store.program.running import run_process

    return run_process(program, lambda words: load(module).PROGRAM.run(words))
