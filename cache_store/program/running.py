"""Run a program: every error that a user can cause becomes one message and an exit code.

The first Ctrl-C or SIGTERM sets STOP_REQUEST, and unwinds work that does not look at it. The second Ctrl-C kills.
"""

import atexit
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any, NoReturn

from cache_store.errors import ConfigError, EncodeOnceError, Interrupted, install
from cache_store.log import log_as_typed, log_error, log_info, refuse_other_format
from cache_store.storage.threads import STOP_REQUEST

FORWARDED_S = 5.0
"""A SIGTERM this soon after the first signal counts as the same request: a scheduler signals every process of a job,
and torchrun then forwards its own signal to the ranks.
"""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

STOPPING = "stopping; another Ctrl-C kills"

STOPPED = "stopped: what is on disk is whole; run the same command again"


class SignalState:
    """The stop signal that this process got, if any, and what a signal does."""

    process = 0
    """The process that listens; a forked child does not."""
    first_s: float | None = None
    """When the first signal came."""
    unwinds = False
    """Whether a signal raises KeyboardInterrupt in the main thread; else the work there looks at STOP_REQUEST."""
    has_unwound = False
    """Whether a signal has raised it."""
    exit_code: int | None = None
    """Exit code of the program, once it has ended; a signal then ends the process at once."""


def handle_stop(number: int, frame: FrameType | None) -> None:
    """Stop at the first signal; kill at another Ctrl-C, or at a SIGTERM that is not the same request."""
    now, first_s = time.monotonic(), SignalState.first_s
    if os.getpid() != SignalState.process or (first_s is not None and now - first_s > FORWARDED_S):
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    if SignalState.exit_code is not None:
        os._exit(SignalState.exit_code)
    if first_s is not None:
        return
    SignalState.first_s = now
    if signal.getsignal(signal.SIGINT) is handle_stop:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # it also ends work that never comes back to Python
    STOP_REQUEST.set()
    if SignalState.unwinds:
        if is_importing(frame):
            log_info(STOPPED)
            end_process(3)
        SignalState.has_unwound = True
        raise KeyboardInterrupt
    with suppress(RuntimeError):  # the signal came while another message was written
        log_info(STOPPING)


def is_importing(frame: FrameType | None) -> bool:
    """Whether the frame or a caller imports a module: an interrupted import prints tracebacks or aborts."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def end_process(exit_code: int) -> NoReturn:
    with suppress(OSError):
        print(end="", flush=True)
    os._exit(exit_code)


def listen() -> dict[int, Any]:
    """Handle both signals from now on, but not one that is ignored; return their previous handlers."""
    STOP_REQUEST.clear()
    SignalState.process, SignalState.first_s, SignalState.has_unwound = os.getpid(), None, False
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handle_stop) for number in handled}


@contextmanager
def stop_on_signals(*, unwinds: bool = False) -> Iterator[Event]:
    """Yield the event that the first signal sets; with `unwinds`, it also raises KeyboardInterrupt in the block.

    Blocks nest: the innermost decides what a signal does.
    """
    is_outermost = SignalState.process != os.getpid()
    before = listen() if is_outermost else {}
    outer = SignalState.unwinds
    try:
        SignalState.unwinds = unwinds
        if unwinds and SignalState.first_s is not None:
            raise KeyboardInterrupt
        yield STOP_REQUEST
    finally:
        SignalState.unwinds = outer
        if is_outermost:
            for number, handler in before.items():
                signal.signal(number, handler)
            STOP_REQUEST.clear()
            SignalState.process = 0


@contextmanager
def hold_stop_signals() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of the block; for processes started in it, until they ignore them.

    Such a signal goes to the whole process group and would kill a worker that is still importing.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """Ignore SIGINT and SIGTERM, in a process started in `hold_stop_signals`; only its parent stops it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


OUR_PACKAGES = ("cache_store", "precompute", "trainer")
"""A missing module of these packages is our bug, not a missing extra."""

REMEDIES = {
    errno.ENOSPC: "free some space or name another place, and run the same command again",
    errno.EROFS: "make it writable or name another place, and run the same command again",
}
"""Advice for errors of a disk, by errno."""


def run_process(program: str, run: Callable[[Sequence[str]], int]) -> int:
    """Run a program's body with the arguments of the command line; then only the process's end is left."""
    listen()
    # The first hook runs last. After it, Python gives signals their default actions, and tears down torch for a while.
    atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS])
    exit_code = run_program(program, run, None)
    if SignalState.first_s is not None:
        end_process(exit_code)
    SignalState.exit_code = exit_code
    STOP_REQUEST.set()  # so that no thread waits for a store
    return exit_code


def run_program(program: str, run: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Run a program's body and turn what users can cause into one message and an exit code."""
    # Torch reads this when it loads, which happens later. Waiting threads that spin take cores from the threads that
    # decode images: on a busy machine only a tenth of the speed was left.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given = sys.argv[1:] if argv is None else argv
    if sys.stderr is None:  # closed by the parent, as some crons do: libraries must not write to the next file opened
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 (stays open until the program ends)
    with stop_on_signals(), log_as_typed(program, given) as words:
        return exit_code_of(program, lambda: run_interruptible(run, words))


def run_interruptible(run: Callable[[Sequence[str]], int], given: Sequence[str]) -> int:
    """Run the body; raise a KeyboardInterrupt again that a library swallowed or turned into an error of its own."""
    try:
        with stop_on_signals(unwinds=True):
            refuse_other_format()
            for word in given:
                if not word.isascii() and word != word.encode(errors="replace").decode():
                    raise ConfigError(f"{word!a} is not UTF-8; every path must be, so rename that file or folder")
            code = run(given)
            print(end="", flush=True)  # an output that cannot be written then fails here, not at exit
    except Exception as error:
        if SignalState.has_unwound and not isinstance(error, Interrupted):
            raise KeyboardInterrupt from error
        raise
    if SignalState.has_unwound:
        raise KeyboardInterrupt
    return code


def exit_code_of(program: str, run: Callable[[], int]) -> int:
    try:
        return run()
    except EncodeOnceError as error:
        if error.exit_code == 3:
            log_info(f"stopped: {error}")
        else:
            log_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        log_info(STOPPED)
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


def output_fails() -> bool:
    try:
        print(end="", flush=True)
    except OSError:
        discard_output()
        return True
    return False


def discard_output() -> None:
    # So that exit does not fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
