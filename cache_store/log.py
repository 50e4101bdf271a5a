"""Messages on standard error: plain for people, or with time and level, as text or as JSON, for a job's log.

All that is no result goes through Python's `logging`. Where no program runs, as in a training loop of a user's own,
Python shows warnings alone, and the user's own handlers may take them.
"""

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType

from cache_store.errors import ConfigError

OPTION = "--log-format"

VARIABLE = "ENCODE_ONCE_LOG_FORMAT"
"""Carries the option to the processes that a program starts; may be set in place of the option."""

ERASE_LINE = "\r\x1b[K"

logger = logging.getLogger("encode_once")


class Running:
    """The program that runs in this process."""

    program = ""


def log_info(message: str, **values: object) -> None:
    """Log what a person may want to know; `values` are further keys of the JSON record."""
    logger.info("%s", message, extra={"values": values})


def log_warning(message: str) -> None:
    """Log what a person should look at, though the work goes on."""
    logger.warning("%s", message)


def log_error(message: str) -> None:
    """Log what ended the program."""
    logger.error("%s", message)


@contextmanager
def logging_as_typed(program: str, words: Sequence[str]) -> Iterator[list[str]]:
    """Log by `--log-format FORMAT` among the words, or by the environment; yield the other words."""
    rest, chosen = without_option(words)
    before, handlers = os.environ.get(VARIABLE), (logger.handlers, logger.propagate)
    if chosen is not None:
        os.environ[VARIABLE] = chosen
    try:
        set_up_log(program)
        yield rest
    finally:
        logger.handlers, logger.propagate = handlers
        os.environ.pop(VARIABLE, None)
        os.environ.update({} if before is None else {VARIABLE: before})


def without_option(words: Sequence[str]) -> tuple[list[str], str | None]:
    """The words without `--log-format`, and its value."""
    rest, chosen, given = list[str](), None, iter(words)
    for word in given:
        name, equals, value = word.partition("=")
        if name == OPTION:
            chosen = value if equals else next(given, "")
        else:
            rest.append(word)
    return rest, chosen


def refuse_other_format() -> None:
    """Raise ConfigError for a log format that does not exist; until then the log is plain."""
    if (chosen := os.environ.get(VARIABLE, "plain")) not in FORMATTERS:
        raise ConfigError(f"{OPTION} (or {VARIABLE}) must be one of {', '.join(FORMATTERS)}, got {chosen!r}")


def set_up_log(program: str) -> None:
    """Send this process's messages to standard error in the format that the environment names."""
    chosen = os.environ.get(VARIABLE, "plain")
    Running.program = program
    handler = StandardError()
    handler.setFormatter(FORMATTERS.get(chosen, Plain)())
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    if chosen != "plain":  # then messages of other libraries, and errors of our own, get a time and a level too
        logging.getLogger().handlers = [handler]
        logging.captureWarnings(True)
        sys.excepthook = log_exception


def is_plain() -> bool:
    return os.environ.get(VARIABLE, "plain") == "plain"


def log_exception(kind: type[BaseException], found: BaseException | None, trace: TracebackType | None) -> None:
    """Log an unexpected error with its traceback."""
    logger.critical("%s", "".join(traceback.format_exception(kind, found, trace)).rstrip())


class StandardError(logging.Handler):
    """Writes to what `sys.stderr` is at the time; drops messages where it is closed."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None:
            bar = ERASE_LINE if sys.stderr.isatty() else ""  # which is drawn again at its next state
            print(bar + self.format(record), file=sys.stderr, flush=True)


class Plain(logging.Formatter):
    """`precompute: error: …`, as people read it."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{Running.program}: {level}{record.getMessage()}"


class Text(logging.Formatter):
    """Time, level, program and message in one line."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{written_at(record)} {record.levelname.lower():7} {Running.program}: {record.getMessage()}"


class Json(logging.Formatter):
    """Time, level, program and message as one JSON object in a line."""

    def format(self, record: logging.LogRecord) -> str:
        said = {"program": Running.program, "message": record.getMessage()}
        fields = {"time": written_at(record), "level": record.levelname.lower(), **said}
        return json.dumps(fields | getattr(record, "values", {}), ensure_ascii=False)


FORMATTERS: dict[str, type[logging.Formatter]] = {"plain": Plain, "text": Text, "json": Json}


def written_at(record: logging.LogRecord) -> str:
    return utc_time(datetime.fromtimestamp(record.created, UTC))


def utc_time(moment: datetime | None = None) -> str:
    """Return an instant, by default now, as in `2026-01-31T23:59:59.123Z`."""
    return (moment or datetime.now(UTC)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
