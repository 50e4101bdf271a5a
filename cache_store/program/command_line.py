"""The command line that the three programs share: commands whose options come from their configs.

It is argparse with two changes: options and YAML files become a config, and a mistake is a ConfigError.
"""

import argparse
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NoReturn, TypeVar

import msgspec
import yaml

from cache_store.errors import ConfigError
from cache_store.log import FORMATS, OPTION, QUIET, log_about
from cache_store.program.config_file import (
    ConfigField,
    config_fields,
    format_value,
    nest_sections,
    on_one_line,
    read_config_file,
    suggest,
    suggest_or_list,
)
from cache_store.program.running import run_program
from cache_store.version import __version__

ConfigT = TypeVar("ConfigT")

CACHE = {"cache": "The cache: its folder, or its URL."}

LOG_FORMAT = "Messages on standard error: plain, text with time and level, or a JSON object a line (default: plain)."


@dataclass(frozen=True)
class Command:
    """A command; with a config but no operand, it also has `--config FILE`."""

    run: Callable[[Any], int]
    """Its docstring is the help. Its argument has operands, options, `config` and `argv` as attributes."""
    config: type | None = None
    operands: Mapping[str, str] = field(default_factory=dict)
    """Each with its help."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options that are not fields of the config: `--report FILE`, or `--extend` without a value."""
    repeats_operand: bool = False
    """Whether the operand, then a list, can be given more than once."""
    fields_of: str = ""
    """The command whose help explains the fields of the config; this one's leaves them out."""
    epilog: str = ""
    """Text below the options in the help, printed unchanged."""

    @property
    def summary(self) -> str:
        return on_one_line(self.run.__doc__).partition(". ")[0].rstrip(".") + "."


@dataclass(frozen=True)
class Program:
    """A program of several commands; `main` is its console script."""

    name: str
    description: str
    examples: str
    commands: Mapping[str, Command]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the command given in `argv` and return the exit code."""
        return run_program(self.name, self.run, argv)

    def run(self, argv: Sequence[str]) -> int:
        arguments = self.parse(argv)
        if cache := getattr(arguments, "cache", None) or getattr(getattr(arguments, "config", None), "cache", None):
            log_about(cache=cache)
        return self.commands[arguments.command].run(arguments)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the command line for a command's `run`; ConfigError, listing the commands, if none was given."""
        if argv and not argv[0].startswith("-") and argv[0] not in self.commands:
            raise ConfigError(f"{self.name} has no command {suggest_or_list(argv[0], self.commands)}")
        if argv:
            return self.parser().parse_args(argv, argparse.Namespace(argv=argv))
        width = max(map(len, self.commands))
        lines = [f"  {name:<{width}}  {command.summary}" for name, command in self.commands.items()]
        usage = f"no command was given; usage: {self.name} COMMAND [options]"
        raise ConfigError("\n".join([usage, *lines, f"{self.name}: run `{self.name} COMMAND --help` for its options"]))

    def parser(self) -> "Parser":
        parser = Parser(prog=self.name, description=self.description, epilog=f"examples:\n{self.examples}")
        parser.usage = f"{self.name} COMMAND [options]"
        parser.add_argument(
            "--version", action="version", version=f"{self.name} {__version__}", help="Show the version and exit."
        )
        more = f"`{self.name} COMMAND --help` explains every option."
        commands = parser.add_subparsers(
            prog=self.name, dest="command", title="commands", description=more, metavar="COMMAND"
        )
        for name, command in self.commands.items():
            commands.add_parser(name, help=command.summary).add_command_arguments(command)
        return parser


def parse_config(config_class: type[ConfigT], argv: Sequence[str], program: str = "", examples: str = "") -> ConfigT:
    parser = Parser(prog=program, description=on_one_line(config_class.__doc__), epilog=examples)
    config: ConfigT = parser.add_command_arguments(Command(lambda _: 0, config_class)).parse_args(argv).config
    return config


class Parser(argparse.ArgumentParser):
    """The parser of a program or of one command."""

    config_class: type | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=HelpFormatter, allow_abbrev=False, add_help=False)
        self.add_argument("-h", "--help", action="help", help="Show this help and exit.")
        self.add(f"{OPTION} {{{','.join(FORMATS)}}}", LOG_FORMAT)
        self.add(QUIET, "No progress and no information on standard error, only warnings and errors.")
        self.fields: dict[str, ConfigField] = {}

    def add_command_arguments(self, command: Command) -> "Parser":
        self.config_class = command.config
        self.fields = {field.name: field for field in config_fields(command.config)} if command.config else {}
        self.description = self.description or on_one_line(command.run.__doc__)
        self.epilog = self.epilog or command.epilog
        words = [name.upper() for name in command.operands]
        many: dict[str, Any] = {"nargs": "+"} if command.repeats_operand else {}
        for name, text in command.operands.items():
            self.add_argument(name, metavar=name.upper(), help=text, **many)
        if many:
            words = [f"{word} [{word} ...]" for word in words]
        if command.config and not command.operands:
            text = "YAML file of fields; options override them."
            self.add_argument("--config", metavar="FILE", action="append", default=[], help=text)
            text = "Print the complete config, made from the file and the other options, and exit."
            self.add("--print-config", text)
            words.append("[--config FILE]")
        else:
            words += [field.option for field in self.fields.values() if field.required]
        for section, members in groupby(self.fields.values(), lambda field: (field.section, field.heading)):
            is_explained = not command.fields_of
            group = self.add_argument_group(*section) if section[0] and is_explained else self
            for each in members:
                text = each.help if is_explained else argparse.SUPPRESS
                self.add(each.option, text, group, dest=each.name, default=argparse.SUPPRESS)
        for option, text in command.options.items():
            self.add(option, text)
        if command.fields_of:
            self.epilog = f"The fields of `{command.fields_of}` are options too; its --help explains them."
        self.usage = " ".join([self.prog, *words, "[options]"])
        return self

    def add(self, option: str, text: str, group: Any = None, **more: Any) -> None:
        """Add an option with its help: `-o,--output OUTPUT`, or `--extend` without a value."""
        names, _, metavar = option.partition(" ")
        kind: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
        (group or self).add_argument(*names.split(","), help=text, **kind, **more)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, refuse unknown options and operands, and make the config."""
        arguments, rest = super().parse_known_args(args, namespace)
        if rest and rest[0].startswith("-"):
            known = [f"--{name}" for name in self.fields]
            self.error(f"there is no option {suggest(rest[0].partition('=')[0], known)}")
        if rest:
            remedy = "quote a pattern or a name with spaces"  # the shell expands an unquoted pattern to many words
            if hasattr(arguments, "config"):
                remedy = f"a config is given as `{self.prog} --config FILE`"
            self.error(f"there is no further operand {format_value(rest[0])}; {remedy}")
        if self.config_class is not None:
            arguments.config = self.read_config(self.config_class, arguments)
        return arguments, rest

    def read_config(self, config_class: type[ConfigT], arguments: argparse.Namespace) -> ConfigT:
        """Make the config from files and options; with `--print-config`, print it and exit."""
        given: dict[str, Any] = {}
        for file in getattr(arguments, "config", []):
            given |= read_config_file(file, self.fields)
        given |= {name: value for name, value in vars(arguments).items() if name in self.fields}
        values = {name: self.fields[name].read(value) for name, value in given.items()}
        if getattr(arguments, "print_config", False):
            defaults = {name: None if field.required else field.default for name, field in self.fields.items()}
            print(yaml.safe_dump(nest_sections(defaults | values), sort_keys=False, allow_unicode=True), end="")
            self.exit()
        if missing := [field.name for field in self.fields.values() if field.required and field.name not in values]:
            self.error(f"missing: {', '.join(missing)}")
        return msgspec.convert(nest_sections(values), config_class)

    def error(self, message: str) -> NoReturn:
        program = self.prog.removeprefix("python -m ").partition(" ")[0]
        raise ConfigError(f"{message}\n{program}: run `{self.prog} --help` for usage")


class HelpFormatter(argparse.HelpFormatter):
    """Keeps the line breaks of examples, and prints percent signs as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def _expand_help(self, action: argparse.Action) -> str:
        return action.help or ""


def drop_options(typed: Sequence[str], valued: Collection[str], flags: Collection[str]) -> Iterator[str]:
    words = iter(typed)
    for word in words:
        if word in valued:
            next(words, None)
        elif word not in flags and word.partition("=")[0] not in valued:
            yield word
