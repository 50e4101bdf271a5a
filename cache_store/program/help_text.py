"""What `--help` shows: for whoever types a command, so in words of the command line and not of Python.

An option's metavar says what it takes (choices in braces, N a whole number), its text what it does and in which unit,
and its remark what holds without it.
"""

import textwrap
from argparse import SUPPRESS, Action, _HelpAction
from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import DefaultHelpFormatter
from jsonargparse._actions import ActionConfigFile, _ActionConfigLoad, _ActionPrintConfig
from jsonargparse._subcommands import ActionSubCommands

PRINT_CONFIG = "Print a complete config, as the file and the other options make it, and exit."

METAVARS = {int: "N", float: "NUMBER", bool: "{true,false}"}


class HelpFormatter(DefaultHelpFormatter):
    """jsonargparse's formatter, with a usage line that fits and without types; examples stay as written."""

    def _format_usage(self, usage: str | None, actions: Iterable[Action], groups: Any, prefix: str | None) -> str:
        program = self._prog.replace(" [options]", "")
        return f"{'usage: ' if prefix is None else prefix}{' '.join([program, *self._usage_words(list(actions))])}\n\n"

    def _usage_words(self, actions: list[Action]) -> Iterator[str]:
        """What has to be typed; a file can hold the fields that are required."""
        has_file = any(isinstance(action, ActionConfigFile) for action in actions)
        for action in actions:
            if not action.option_strings:
                yield "COMMAND" if isinstance(action, ActionSubCommands) else self._format_action_invocation(action)
            elif action.required and not has_file:
                yield self._format_action_invocation(action)
        if has_file:
            yield "[--config FILE]"
        yield "[options]"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def start_section(self, heading: str | None) -> None:
        super().start_section(textwrap.fill(heading or "", self._width - 1))

    def add_argument(self, action: Action) -> None:
        if not isinstance(action, _ActionConfigLoad):  # a file for one section alone: nobody asked for it
            super().add_argument(action)

    def _format_action(self, action: Action) -> str:
        if isinstance(action, ActionSubCommands):
            return "".join(map(self._format_action, action._get_subactions()))
        return super()._format_action(action)

    def _format_action_invocation(self, action: Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(name for name in action.option_strings if not name.endswith("+"))
        if action.nargs == 0 or isinstance(action, _ActionPrintConfig):
            return names
        return f"{names} {self._format_args(action, self._get_default_metavar_for_optional(action))}"

    def _get_default_metavar_for_optional(self, action: Action) -> str:
        name = super()._get_default_metavar_for_optional(action)
        return metavar(getattr(action, "_typehint", action.type)) or name

    def _get_default_metavar_for_positional(self, action: Action) -> str:
        return action.dest.upper()

    def _get_help_string(self, action: Action) -> str:
        if isinstance(action, _HelpAction):
            return "Show this help and exit."
        if isinstance(action, _ActionPrintConfig):
            return PRINT_CONFIG
        remark = self._remark(action)
        return f"{action.help} ({remark})" if remark else action.help or ""

    def _remark(self, action: Action) -> str | None:
        """Where nothing is the default, the text says what that means."""
        if not action.option_strings or action.default is SUPPRESS or action.nargs == 0:
            return None
        if action.required:
            return "required"
        return None if action.default is None else f"default: {as_typed(action.default)}"


def metavar(annotation: Any) -> str | None:
    """What is typed for a field of this type; None where only the field's name can say it."""
    if get_origin(annotation) in (Union, UnionType):
        words = [word for each in get_args(annotation) if (word := metavar(each))]
        return "|".join(word.strip("{}") for word in words) if len(words) > 1 else next(iter(words), None)
    if get_origin(annotation) is Literal:
        return f"{{{','.join(get_args(annotation))}}}"
    if get_origin(annotation) is list:
        return f"[{metavar(*get_args(annotation))},…]"
    return METAVARS.get(annotation)


def as_typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
