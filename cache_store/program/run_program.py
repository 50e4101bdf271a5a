"""Running a program: every error that a user can cause becomes one message and an exit code."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from cache_store.errors import ConfigError, EncodeOnceError, Interrupted, install
from cache_store.log import log_error, log_info, logging_as_typed, refuse_other_format
from cache_store.program.stop_signals import stop_retrying, unwound_by_signals
from cache_store.storage.callers import giving_up

OUR_PACKAGES = ("cache_store", "precompute", "trainer")
"""A missing module of these is a bug of ours, not an extra that was not installed."""

STDERR = 2
"""Its file descriptor."""

REMEDIES = {
    errno.ENOSPC: "free some space or name another place, and run the same command again",
    errno.EROFS: "make it writable or name another place, and run the same command again",
}
"""What to do about a disk."""


def start(program: str, module: str) -> int:
    """Run the program whose `PROGRAM` is in `module`, with the words typed."""

    def run(words: Sequence[str]) -> int:
        return import_module(module).PROGRAM.run(words)  # type: ignore[no-any-return]

    return run_program(program, run, None)


def run_program(program: str, run: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Run a program's body and turn what users can cause into one message and an exit code."""
    # Read when torch is loaded, which programs do later. Threads that spin while they wait take the cores from the
    # threads that decode images: one tenth of the speed was measured on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given = sys.argv[1:] if argv is None else argv
    open_closed_stderr()
    with unwound_by_signals() as asked_to_stop, giving_up(asked_to_stop), logging_as_typed(program, given) as words:
        return exit_code_of(program, lambda: interruptible(run, words, asked_to_stop))


def interruptible(run: Callable[[Sequence[str]], int], given: Sequence[str], asked_to_stop: Callable[[], bool]) -> int:
    """Run the body; an error after a signal is the stop: libraries make their own of it, such as unreadable weights."""
    try:
        refuse_other_format()
        refuse_other_than_utf8(given)
        code = run(given)
    except Exception as error:
        if asked_to_stop() and not isinstance(error, Interrupted):
            stop_retrying()
            raise KeyboardInterrupt from error
        raise
    if asked_to_stop():  # C++ code has swallowed it, or it came at the very end
        stop_retrying()
        raise KeyboardInterrupt
    return code


def exit_code_of(program: str, run: Callable[[], int]) -> int:
    try:
        code = run()
        print(end="", flush=True)  # so that an output that takes no more fails here, and not at exit
        return code
    except EncodeOnceError as error:
        if error.exit_code == 3:
            log_info(f"stopped: {error}")
        else:
            log_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        log_info("stopped: what is on disk is whole; run the same command again")
        return 3
    except BrokenPipeError:  # the reader of our output (`| head`) has gone
        discard_output()
        return 128 + signal.SIGPIPE  # as shells have it of a program that this ended; 1 would say that it failed
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package in OUR_PACKAGES:
            raise
        extra = "" if program == "cache-store" else program
        log_error(f"{package} is not installed; run {install(extra)}")
        return 2
    except OSError as error:  # a full disk, a lost mount, a missing permission: the user's to mend
        remedy = f"; {REMEDIES[error.errno]}" if error.errno in REMEDIES else ""
        where = error.filename or ("standard output" if output_fails() else "no file named")
        log_error(f"{error.strerror or error}: {where}{remedy}")
        return 1


def open_closed_stderr() -> None:
    """Discard messages where the parent has closed standard error, as some crons do (`2>&-`).

    Else the next file that is opened gets its number, and what libraries write there.
    """
    if sys.stderr is None:
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.fstat(STDERR)
        except OSError:
            os.dup2(null, STDERR)
        if null == STDERR:
            os.set_inheritable(STDERR, True)
        sys.stderr = open(null, "w", closefd=False)  # noqa: SIM115 (until the end)


def output_fails() -> bool:
    """Whether what was printed cannot be written; it is then discarded."""
    try:
        print(end="", flush=True)
    except OSError:
        discard_output()
        return True
    return False


def discard_output() -> None:
    """Point stdout away, so that exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def refuse_other_than_utf8(words: Sequence[str]) -> None:
    """Raise ConfigError for a path that could not be printed or recorded: all text of a cache is UTF-8."""
    for word in words:
        if not word.isascii() and word != word.encode(errors="replace").decode():
            raise ConfigError(f"{word!a} is not UTF-8, as every path and option has to be; rename what it names")
