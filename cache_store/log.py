"""Log messages to standard error: plain for people, or with time and level, as text or JSON, for a job's log.

Everything except results goes through Python's `logging`, whose handlers a user's own training loop may set.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import ClassVar

from cache_store.errors import ConfigError

OPTION = "--log-format"

VARIABLE = "ENCODE_ONCE_LOG_FORMAT"
"""Environment variable that passes the option to child processes; users may set it instead of the option."""

QUIET, QUIET_VARIABLE = "--quiet", "ENCODE_ONCE_QUIET"
"""Option that leaves warnings and errors only, and its environment variable; any text but the empty one sets it."""

ERASE_LINE = "\r\x1b[K"

logger = logging.getLogger("encode_once")


class Running:
    """What runs in this process."""

    program = ""
    about: ClassVar[dict[str, object]] = {}
    """Further keys of every JSON record: the cache, and the rank."""


def log_info(message: str, **values: object) -> None:
    """Log information for the user; `values` are further keys of the JSON record."""
    logger.info("%s", message, extra={"values": values})


def log_warning(message: str, **values: object) -> None:
    """Log a problem that does not end the work; `values` are further keys of the JSON record."""
    logger.warning("%s", message, extra={"values": values})


def log_result(message: str, **values: object) -> None:
    """Log what standard output tells people, unless messages are plain."""
    if not is_plain():
        log_info(message, **values)


def log_about(**values: object) -> None:
    """Add keys to every JSON record from now on."""
    Running.about |= values


def log_error(message: str) -> None:
    logger.error("%s", message)


@contextmanager
def log_as_typed(program: str, words: Sequence[str]) -> Iterator[list[str]]:
    """Log as `--log-format FORMAT` and `--quiet` among the words, or the environment, say; yield the other words."""
    rest, chosen = split_off_options(words)
    before = {name: os.environ.get(name) for name in (VARIABLE, QUIET_VARIABLE)}
    handlers = logger.handlers, logger.propagate
    os.environ.update(chosen)
    try:
        set_up_log(program)
        yield rest
    finally:
        Running.about = {}
        logger.handlers, logger.propagate = handlers
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def split_off_options(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    rest, chosen, given = list[str](), dict[str, str](), iter(words)
    for word in given:
        name, equals, value = word.partition("=")
        if name == OPTION:
            chosen[VARIABLE] = value if equals else next(given, "")
        elif word == QUIET:
            chosen[QUIET_VARIABLE] = "1"
        else:
            rest.append(word)
    return rest, chosen


def refuse_other_format() -> None:
    """Raise ConfigError for an unknown log format, which is treated as plain until then."""
    if (chosen := chosen_format()) not in FORMATS:
        raise ConfigError(f"{OPTION} (or {VARIABLE}) must be one of {', '.join(FORMATS)}, got {chosen!r}")


def set_up_log(program: str) -> None:
    """Send this process's messages to standard error in the environment's format."""
    Running.program = program
    handler = StandardError()
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.WARNING if is_quiet() else logging.INFO)
    if not is_plain():  # so that messages of other libraries get a time and a level too
        logging.getLogger().handlers = [handler]
        logging.captureWarnings(True)


def chosen_format() -> str:
    return os.environ.get(VARIABLE, "plain")


def is_plain() -> bool:
    return chosen_format() == "plain"


def is_quiet() -> bool:
    return bool(os.environ.get(QUIET_VARIABLE))


def plain(record: logging.LogRecord) -> str:
    level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
    return f"{Running.program}: {level}{record.getMessage()}"


def text(record: logging.LogRecord) -> str:
    return f"{written_at(record)} {record.levelname.lower():7} {Running.program}: {record.getMessage()}"


def json_object(record: logging.LogRecord) -> str:
    fields = {
        "time": written_at(record),
        "level": record.levelname.lower(),
        "program": Running.program,
        "host": os.uname().nodename,
        **Running.about,
        "message": record.getMessage(),
    }
    return json.dumps(fields | getattr(record, "values", {}), ensure_ascii=False)


FORMATS = {"plain": plain, "text": text, "json": json_object}


class StandardError(logging.Handler):
    """Writes to the current `sys.stderr`, in the environment's format; drops messages if it is closed."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None:
            bar = ERASE_LINE if sys.stderr.isatty() else ""  # the bar is drawn again at its next state
            print(bar + FORMATS.get(chosen_format(), plain)(record), file=sys.stderr, flush=True)


def written_at(record: logging.LogRecord) -> str:
    return utc_time(datetime.fromtimestamp(record.created, UTC))


def utc_time(moment: datetime | None = None) -> str:
    """Format an instant, by default now: `2026-01-31T23:59:59.123Z`."""
    return (moment or datetime.now(UTC)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
