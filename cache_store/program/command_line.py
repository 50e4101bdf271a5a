"""The edge that the three programs share: config files into dataclasses, errors into one line and an exit code.

jsonargparse reads the dataclasses, so a field's type, default and docstring are written once, beside the
code that they configure.
"""

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings
from jsonargparse._actions import ActionConfigFile  # public, but not said to be
from jsonargparse._subcommands import ActionSubCommands
from yaml import YAMLError

from cache_store.errors import ConfigError, EncodeOnceError
from cache_store.program.help_text import HelpFormatter
from cache_store.program.usage_errors import no_section, plain_words, shortened
from cache_store.program.yaml_text import load_yaml, use_for_configs

use_for_configs()
set_parsing_settings(docstring_parse_attribute_docstrings=True)

ConfigT = TypeVar("ConfigT")

OUR_PACKAGES = ("cache_store", "precompute", "trainer")
"""A module of theirs that is missing is our mistake, not an extra that was left out."""

FORWARDED_S = 5.0
"""A SIGTERM this soon after the first signal is the same request: schedulers send theirs to every process of a job,
and torchrun then forwards its own to the ranks."""


class ConfigFile(ActionConfigFile):  # what action="config" stands for
    """`--config`, for a file too that itself has a field of that name, as a cache's build.json has."""

    @staticmethod
    def apply_config(parser: ArgumentParser, cfg: Namespace, dest: str, value: str) -> None:
        try:
            ActionConfigFile.apply_config(parser, cfg, dest, value)
            path = cfg[dest][-1]  # None where the text of a config stands in a file's place
            if path is not None and Path(path).is_file():  # a pipe cannot be read again
                refuse_unknown(parser, value, load_yaml(Path(path).read_text(encoding="utf-8")))
        except UnicodeDecodeError as error:
            place = f"byte {error.start} is {error.object[error.start]:#04x}"
            raise ConfigError(f"{value} is not UTF-8: {place}; save the file as UTF-8") from None
        except RecursionError:
            raise ConfigError(f"{value} is nested too deeply for a config") from None
        except argparse.ArgumentError as error:
            fault = getattr(error.__cause__, "__cause__", None)
            if isinstance(fault, YAMLError):
                words = " ".join(str(fault).replace('in "<unicode string>", ', "at ").split())
                raise ConfigError(f"{value} cannot be read as a config: {words}") from None
            if str(error).startswith("Unexpected config"):  # followed by all that the file holds
                raise ConfigError(
                    f"{value} holds no config: expected fields with values, such as `cache: FOLDER`"
                ) from None
            raise
        except AttributeError:
            if isinstance(cfg.get(dest), list):
                raise
            raise TypeError(f"{value} has a field {dest!r}, which no config has") from None  # it took the list's place


def refuse_unknown(parser: ArgumentParser, file: str, values: dict[str, Any], section: str = "") -> None:
    """ConfigError for a key that no field has; jsonargparse lets an empty section of any name pass."""
    fields = {action.dest for action in parser._actions}
    for key, value in values.items():
        name = f"{section}{key}"
        if not any(field == name or field.startswith(f"{name}.") for field in fields):
            raise ConfigError(f"{file}: there is no field {shortened(name)}")
        if isinstance(value, dict) and any(field.startswith(f"{name}.") for field in fields):
            refuse_unknown(parser, file, value, f"{name}.")


def program_parser(program: str, description: str, examples: str) -> ArgumentParser:
    """The parser of a program whose commands `add_commands` adds."""
    return ArgumentParser(
        prog=program,
        exit_on_error=False,
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=HelpFormatter,
    )


def command_parser(config_class: type, description: str) -> ArgumentParser:
    """A parser of `--config FILE` and one option per field of `config_class`."""
    parser = ArgumentParser(exit_on_error=False, description=description)
    text = "YAML file; options after it override its fields."
    parser.add_argument("--config", action=ConfigFile, metavar="FILE", help=text)
    add_fields(parser, config_class)
    return parser


def cache_parser(description: str | None, cache: str = "The cache's folder.", **operands: str) -> ArgumentParser:
    """A parser of the operand CACHE, and of further ones by name and text."""
    parser = ArgumentParser(exit_on_error=False, description=description)
    for name, text in {"cache": cache, **operands}.items():
        parser.add_argument(name, type=str, help=text)
    return parser


def add_fields(parser: ArgumentParser, config_class: type, skip: Collection[str] = ()) -> None:
    """One option per field of `config_class`, without a heading that says the command's description again."""
    parser.add_class_arguments(config_class, None, as_group=False, skip=set(skip))


def add_commands(parser: ArgumentParser) -> Any:
    """What the program's commands are added to."""
    more = f"`{parser.prog} COMMAND --help` explains every option."
    return parser.add_subcommands(dest="command", title="commands", description=more, metavar="COMMAND")


def parse_command(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """The command and its options; ConfigError that lists the commands where nothing was typed."""
    if argv:
        return parser.parse_args(list(argv))
    commands = [
        action
        for group in parser._actions
        if isinstance(group, ActionSubCommands)
        for action in group._get_subactions()
    ]
    width = max(len(action.dest) for action in commands)
    lines = [f"  {action.dest:<{width}}  {action.help}" for action in commands]
    usage = f"no command was given; usage: {parser.prog} COMMAND [options]"
    raise ConfigError("\n".join([usage, *lines, f"{parser.prog}: run `{parser.prog} COMMAND --help` for its options"]))


def to_config(config_class: type[ConfigT], parser: ArgumentParser, arguments: Namespace) -> ConfigT:
    """The frozen config that `arguments` describe; its `__post_init__` may raise ConfigError."""
    for field in fields(config_class):  # type: ignore[arg-type]
        value = arguments.get(field.name)
        if is_dataclass(field.type) and not isinstance(value, Namespace):
            raise ConfigError(no_section(field.name, value))
    refuse_null(config_class, arguments)
    values = parser.instantiate(arguments)
    return config_class(**{field.name: values[field.name] for field in fields(config_class)})  # type: ignore[arg-type]


def refuse_null(config_class: type, values: Namespace, section: str = "") -> None:
    """ConfigError for a field that a file sets to null and that cannot be; jsonargparse lets that pass."""
    for name, kind in get_type_hints(config_class).items():
        value = values.get(name)
        if is_dataclass(kind) and isinstance(value, Namespace):
            refuse_null(kind, value, f"{section}{name}.")  # type: ignore[arg-type]
        elif value is None and type(None) not in get_args(kind):
            raise ConfigError(f"{section}{name} cannot be null; give it a value, or leave it out for its default")


def run_program(program: str, run: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Run a program's body and turn what users can cause into one message and an exit code."""
    # Read when torch is loaded, which programs do later. Threads that spin while they wait take the cores from the
    # threads that decode images: one tenth of the speed was measured on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given = sys.argv[1:] if argv is None else argv
    with unwound_by_sigterm():
        return exit_code_of(program, run, given)


def exit_code_of(program: str, run: Callable[[Sequence[str]], int], given: Sequence[str]) -> int:
    try:
        refuse_other_than_utf8(given)
        return run(given)
    except argparse.ArgumentError as error:
        known = "invalid choice" not in str(error)  # else the first word is no command
        command = " ".join([program, *[word for word in given[:1] if known and not word.startswith("-")]])
        message = plain_words(str(error))
        print(f"{program}: error: {message}\n{program}: run `{command} --help` for usage", file=sys.stderr)
        return 2
    except EncodeOnceError as error:
        kind = "stopped" if error.exit_code == 3 else "error"
        print(f"{program}: {kind}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{program}: stopped: what is on disk is whole, run the same command to go on", file=sys.stderr)
        return 3
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone; point stdout away so that exit does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package in OUR_PACKAGES:
            raise
        extra = "" if program == "cache-store" else f"[{program}]"
        remedy = f"`pip install '.{extra}'` in a clone of encode-once"
        print(f"{program}: error: {package} is not installed; run {remedy}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a lost mount, a missing permission: the user's to mend
        print(f"{program}: error: {error.strerror or error}: {error.filename or 'no file named'}", file=sys.stderr)
        return 1


def refuse_other_than_utf8(words: Sequence[str]) -> None:
    """ConfigError for a path that could be neither shown nor recorded: every text of a cache is UTF-8."""
    for word in words:
        if not word.isascii() and word != word.encode(errors="replace").decode():
            raise ConfigError(f"{word!a} is not UTF-8, as every path and option has to be; rename what it names")


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that scratch files go and the exit code is that of a stop."""
    ours, asked = os.getpid(), -math.inf

    def unwind(number: int, frame: object) -> None:
        nonlocal asked
        if os.getpid() != ours:
            signal.signal(number, signal.SIG_DFL)  # a forked child dies of it, as its parent expects
            os.kill(os.getpid(), number)
        elif time.monotonic() - asked > FORWARDED_S:
            asked = time.monotonic()
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def stop_on_signals(stop: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Call `stop` at the first SIGTERM or SIGINT; a second SIGINT, or a SIGTERM that is no echo, acts without us."""
    previous: dict[signal.Signals, Any] = {}
    asked: float | None = None

    def handle(number: int, frame: object) -> None:
        nonlocal asked
        if asked is None:
            asked = clock()
            print("\nstopping; another Ctrl-C stops at once", file=sys.stderr)
            stop()
        elif number == signal.SIGINT or clock() - asked > FORWARDED_S:
            restore()
            signal.raise_signal(number)

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    for number in (signal.SIGTERM, signal.SIGINT):
        previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        restore()
