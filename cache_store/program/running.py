"""Run a program: every error that a user can cause becomes one message and an exit code.

SIGTERM and Ctrl-C stop the program at once, or ask its work to stop.
"""

import errno
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any

from cache_store.errors import ConfigError, EncodeOnceError, Interrupted, install
from cache_store.log import log_as_typed, log_error, log_info, refuse_other_format
from cache_store.storage.calls import abandon_calls_after

FORWARDED_S = 5.0
"""A SIGTERM this soon after the first signal counts as the same request: a scheduler signals every process of a job,
and torchrun then forwards its own signal to the ranks.
"""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

RETRY, RETRY_S = signal.SIGALRM, 0.05
"""Signal and delay of our timer, which repeats a stop that Python swallowed."""


@contextmanager
def hold_stop_signals() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of the block.

    Processes started in the block do not receive them until they call `ignore_stop_signals`: a signal goes to the whole
    process group and would kill a worker that is still importing.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, RETRY))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """Ignore SIGINT and SIGTERM, in a process started in `hold_stop_signals`; only its parent stops it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def unwind_on_signals() -> Iterator[Callable[[], bool]]:
    """Let SIGTERM end the block as Ctrl-C does, so that scratch files are removed and the exit code is 3.

    Yields a function that returns whether a signal came.
    """
    ours, last_signal_s = os.getpid(), -math.inf

    def unwind(number: int, frame: FrameType | None) -> None:
        nonlocal last_signal_s
        if os.getpid() != ours:
            signal.signal(number, signal.SIG_DFL)  # a forked child is ended by the signal, as its parent expects
            os.kill(os.getpid(), number)
        elif number != signal.SIGTERM or time.monotonic() - last_signal_s > FORWARDED_S:
            last_signal_s = time.monotonic()
            stop_retrying()
            raise KeyboardInterrupt

    # A process that ignores Ctrl-C, such as a shell's background job, continues to ignore it.
    heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, unwind) for number in (*heard, RETRY)}
    with keep_interrupts():
        try:
            yield lambda: last_signal_s > -math.inf
        finally:
            stop_retrying()
            for number, handler in previous.items():
                signal.signal(number, handler)


def stop_retrying() -> None:
    """Cancel a stop that is to be repeated: it would interrupt the message about the stop."""
    signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def keep_interrupts() -> Iterator[None]:
    """Raise a KeyboardInterrupt again if Python could only print it: from a `__del__` or a weakref callback."""
    before = sys.unraisablehook

    def retry(unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, RETRY_S)
        else:
            before(unraisable)

    sys.unraisablehook = retry
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def stop_on_signals(stop: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Call `stop` at the first SIGTERM or SIGINT; a second SIGINT, or a late SIGTERM, goes to the old handler."""
    previous: dict[signal.Signals, Any] = {}
    first_signal_s: float | None = None

    def handle(number: int, frame: object) -> None:
        nonlocal first_signal_s
        if first_signal_s is None:
            first_signal_s = clock()
            log_info("stopping; another Ctrl-C stops at once")
            stop()
        elif number == signal.SIGINT or clock() - first_signal_s > FORWARDED_S:
            restore()
            signal.raise_signal(number)

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    for number in STOP_SIGNALS:
        previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        restore()


OUR_PACKAGES = ("cache_store", "precompute", "trainer")
"""A missing module of these packages is our bug, not a missing extra."""

STDERR = 2
"""Its file descriptor."""

REMEDIES = {
    errno.ENOSPC: "free some space or name another place, and run the same command again",
    errno.EROFS: "make it writable or name another place, and run the same command again",
}
"""Advice for errors of a disk, by errno."""


def start(program: str, module: str) -> int:
    """Run `PROGRAM` of `module` with the arguments of the command line."""

    def run(words: Sequence[str]) -> int:
        with hold_stop_signals():  # an interrupted import prints tracebacks, and can abort the program in C++ code
            program = import_module(module).PROGRAM
        return program.run(words)  # type: ignore[no-any-return]

    return run_program(program, run, None)


def run_program(program: str, run: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Run a program's body and turn what users can cause into one message and an exit code."""
    # Torch reads this when it loads, which happens later. Waiting threads that spin take cores from the threads that
    # decode images: on a busy machine only a tenth of the speed was left.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given = sys.argv[1:] if argv is None else argv
    open_closed_stderr()
    with (
        unwind_on_signals() as asked_to_stop,
        abandon_calls_after(asked_to_stop),
        log_as_typed(program, given) as words,
    ):
        return exit_code_of(program, lambda: run_interruptible(run, words, asked_to_stop))


def run_interruptible(
    run: Callable[[Sequence[str]], int], given: Sequence[str], asked_to_stop: Callable[[], bool]
) -> int:
    """Run the body; an error after a stop signal becomes KeyboardInterrupt.

    Libraries turn the interruption into errors of their own, such as unreadable weights.
    """
    try:
        refuse_other_format()
        refuse_other_than_utf8(given)
        code = run(given)
    except Exception as error:
        if asked_to_stop() and not isinstance(error, Interrupted):
            stop_retrying()
            raise KeyboardInterrupt from error
        raise
    if asked_to_stop():  # the interrupt was swallowed by C++ code, or came at the very end
        stop_retrying()
        raise KeyboardInterrupt
    return code


def exit_code_of(program: str, run: Callable[[], int]) -> int:
    try:
        code = run()
        print(end="", flush=True)  # an output that cannot be written then fails here, not at exit
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
        return 128 + signal.SIGPIPE  # the code that shells give a program ended by this signal; 1 would mean failure
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package in OUR_PACKAGES:
            raise
        extra = "" if program == "cache-store" else program
        log_error(f"{package} is not installed; run {install(extra)}")
        return 2
    except OSError as error:  # the user can fix it: a full disk, a lost mount, a missing permission
        remedy = f"; {REMEDIES[error.errno]}" if error.errno in REMEDIES else ""
        where = error.filename or ("standard output" if output_fails() else "no file named")
        log_error(f"{error.strerror or error}: {where}{remedy}")
        return 1


def open_closed_stderr() -> None:
    """Discard messages if the parent process has closed standard error (`2>&-`), as some crons do.

    Otherwise the next file that is opened gets its number, and the messages that libraries write to it.
    """
    if sys.stderr is None:
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.fstat(STDERR)
        except OSError:
            os.dup2(null, STDERR)
        if null == STDERR:
            os.set_inheritable(STDERR, True)
        sys.stderr = open(null, "w", closefd=False)  # noqa: SIM115 (stays open until the program ends)


def output_fails() -> bool:
    """Return whether standard output cannot be written; if so, discard it."""
    try:
        print(end="", flush=True)
    except OSError:
        discard_output()
        return True
    return False


def discard_output() -> None:
    """Redirect stdout to the null device, so that exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def refuse_other_than_utf8(words: Sequence[str]) -> None:
    """Raise ConfigError for a word that is not UTF-8: it could not be printed, nor recorded in a cache."""
    for word in words:
        if not word.isascii() and word != word.encode(errors="replace").decode():
            raise ConfigError(f"{word!a} is not UTF-8; every path and option must be, so rename that file or folder")


def usable_cores() -> int:
    """Count the CPU cores that this process may run on, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
