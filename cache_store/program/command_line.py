"""The command line that the three programs share: commands, whose options follow from their configs.

It is argparse with two changes: options and YAML files become a config, and a mistake is a ConfigError.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NoReturn, TypeVar

import msgspec
import yaml

from cache_store.errors import ConfigError
from cache_store.log import FORMATTERS, OPTION
from cache_store.program.config_fields import ConfigField, config_fields, on_one_line
from cache_store.program.config_file import closest, closest_or_all, nested, read_config_file, shown
from cache_store.program.run_program import run_program
from cache_store.version import __version__

ConfigT = TypeVar("ConfigT")

CACHE = {"cache": "The cache: its folder, or its URL."}
"""The operand of most commands."""

LOG_FORMAT = "Messages on standard error: plain, text with time and level, or a JSON object a line (default: plain)."
"""Taken before commands are looked at, by `run_program`; here for the help."""


@dataclass(frozen=True)
class Command:
    """One command of a program, and what is typed for it; with a config and no operand, `--config FILE` too."""

    run: Callable[[Any], int]
    """Its docstring is the command's help. Its argument has operands and options by name, the config as `config`
    and all words typed as `argv`."""
    config: type | None = None
    operands: Mapping[str, str] = field(default_factory=dict)
    """What is given by position, with its help."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options that are no fields of the config, with their help: `--report FILE`, or `--extend` without a value."""
    epilog: str = ""
    """What stands below the options in its help, as it is written."""

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
        """Run the command that is typed and return the exit code."""
        return run_program(self.name, self.run, argv)

    def run(self, argv: Sequence[str]) -> int:
        arguments = self.parse(argv)
        return self.commands[arguments.command].run(arguments)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The argument of a command's `run`; ConfigError that lists the commands where none of them was typed."""
        if argv and not argv[0].startswith("-") and argv[0] not in self.commands:
            raise ConfigError(f"{self.name} has no command {closest_or_all(argv[0], self.commands)}")
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
            commands.add_parser(name, help=command.summary).take(command)
        return parser


def parse_config(config_class: type[ConfigT], argv: Sequence[str], program: str = "", examples: str = "") -> ConfigT:
    """The config that is typed for a program of one command."""
    parser = Parser(prog=program, description=on_one_line(config_class.__doc__), epilog=examples)
    config: ConfigT = parser.take(Command(lambda _: 0, config_class)).parse_args(argv).config
    return config


class Parser(argparse.ArgumentParser):
    """The parser of a program or of one command."""

    config_class: type | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=HelpFormatter, allow_abbrev=False, add_help=False)
        self.add_argument("-h", "--help", action="help", help="Show this help and exit.")
        self.add(f"{OPTION} {{{','.join(FORMATTERS)}}}", LOG_FORMAT)
        self.fields: dict[str, ConfigField] = {}

    def take(self, command: Command) -> "Parser":
        """Accept what is typed for `command`."""
        self.config_class = command.config
        self.fields = {field.name: field for field in config_fields(command.config)} if command.config else {}
        self.description = self.description or on_one_line(command.run.__doc__)
        self.epilog = self.epilog or command.epilog
        words = [name.upper() for name in command.operands]
        for name, text in command.operands.items():
            self.add_argument(name, metavar=name.upper(), help=text)
        if command.config and not command.operands:
            text = "YAML file of fields; options override them."
            self.add_argument("--config", metavar="FILE", action="append", default=[], help=text)
            self.add("--print_config", "Print a complete config, as the file and the other options make it, and exit.")
            words.append("[--config FILE]")
        else:
            words += [field.typed for field in self.fields.values() if field.required]
        for section, members in groupby(self.fields.values(), lambda field: (field.section, field.heading)):
            group = self.add_argument_group(*section) if section[0] else self
            for each in members:
                self.add(each.typed, each.help, group, dest=each.name, default=argparse.SUPPRESS)
        for typed, text in command.options.items():
            self.add(typed, text)
        self.usage = " ".join([self.prog, *words, "[options]"])
        return self

    def add(self, typed: str, text: str, group: Any = None, **more: Any) -> None:
        """Accept an option as it is typed, with its text: `-o,--output OUTPUT`, or `--extend` without a value."""
        names, _, metavar = typed.partition(" ")
        kind: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
        (group or self).add_argument(*names.split(","), help=text, **kind, **more)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, for a command too; makes the config."""
        arguments, rest = super().parse_known_args(args, namespace)
        if rest and rest[0].startswith("-"):
            known = [f"--{name}" for name in self.fields]
            self.error(f"there is no option {closest(rest[0].partition('=')[0], known)}")
        if rest:  # of a pattern, a shell makes many words
            quoted = "a pattern, or a name with spaces, has to be quoted"
            self.error(f"there is no further operand {shown(rest[0])}; {quoted}")
        if self.config_class is not None:
            arguments.config = self.read_config(self.config_class, arguments)
        return arguments, rest

    def read_config(self, config_class: type[ConfigT], arguments: argparse.Namespace) -> ConfigT:
        """The config of files and options; for `--print_config`, prints it and exits."""
        given: dict[str, Any] = {}
        for file in getattr(arguments, "config", []):
            given |= read_config_file(file, self.fields)
        given |= {name: value for name, value in vars(arguments).items() if name in self.fields}
        values = {name: self.fields[name].read(value) for name, value in given.items()}
        needed = (field for field in self.fields.values() if field.required or field.instead)
        missing = [field for field in needed if not {field.name, *field.instead} & values.keys()]
        if getattr(arguments, "print_config", False):
            defaults = {name: None if field.required else field.default for name, field in self.fields.items()}
            print(yaml.safe_dump(nested(defaults | values), sort_keys=False, allow_unicode=True), end="")
            self.exit()
        if any(field.required for field in missing):
            self.error(f"missing: {', '.join(' or '.join([field.name, *field.instead]) for field in missing)}")
        return msgspec.convert(nested(values), config_class)

    def error(self, message: str) -> NoReturn:
        program = self.prog.removeprefix("python -m ").partition(" ")[0]
        raise ConfigError(f"{message}\n{program}: run `{self.prog} --help` for usage")


class HelpFormatter(argparse.HelpFormatter):
    """argparse's, but that examples stay as they are written and a percent sign is one."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def _expand_help(self, action: argparse.Action) -> str:
        return action.help or ""
