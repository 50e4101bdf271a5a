"""The fields of a config: a frozen dataclass of values and of sections, which are frozen dataclasses too.

A field's type, default and docstring stand in the dataclass alone; options, help and checks follow from them.
"""

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from cache_store.errors import ConfigError
from cache_store.program.config_file import load_yaml, shortened

ConfigT = TypeVar("ConfigT")

METAVARS = {int: "N", float: "NUMBER", bool: "{true,false}", list[int]: "[N,…]"}
TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list[int]: "a list of whole numbers",
}


@dataclass(frozen=True)
class ConfigField:
    """A field of a config or of one of its sections."""

    section: str
    """Empty for the config's own fields."""
    heading: str
    """The docstring of the section."""
    name: str
    """As it is typed: `store.codec`."""
    kind: Any
    """Its type."""
    default: Any
    """MISSING where a value is required."""
    text: str
    """The docstring under it."""
    short: str | None = None
    """A short name too: `-o`."""
    is_flag: bool = False
    """Switched on by its name alone."""

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def metavar(self) -> str:
        words = in_words(self.kind, METAVARS, lambda choices: f"{{{','.join(choices)}}}", "|")
        return words or self.name.rpartition(".")[2].upper()

    @property
    def help(self) -> str:
        """The docstring and the default, unless that is null: the docstring says what null means."""
        if self.required:
            return f"{self.text} (required)"
        return (
            self.text if self.is_flag or self.default is None else f"{self.text} (default: {as_option(self.default)})"
        )

    def read(self, value: Any) -> Any:
        """A value of a file or of the command line in the field's type; ConfigError where it does not fit."""
        if isinstance(value, str) and (not fits(value, self.kind) or (value == "null" and fits(None, self.kind))):
            value = read_text(value)
        if value is None and not fits(None, self.kind):
            raise ConfigError(f"{self.name} cannot be null; give it a value, or leave it out for its default")
        if not fits(value, self.kind):
            expected = in_words(self.kind, TYPE_WORDS, lambda choices: f"one of {', '.join(choices)}", " or ")
            raise ConfigError(f"{self.name} must be {expected}, got {shortened(as_option(value))}")
        return float(value) if type(value) is int and int not in alternatives(self.kind) else value


def config_fields(config_class: type, section: str = "") -> Iterator[ConfigField]:
    """Every field of a config, those of a section in its place."""
    kinds: dict[str, Any] = get_type_hints(config_class)
    texts, heading = field_texts(config_class), on_one_line(config_class.__doc__)
    for field in fields(config_class):
        name, kind = f"{section}.{field.name}".lstrip("."), kinds[field.name]
        if is_section(kind):
            yield from config_fields(kind, name)
        else:
            text = on_one_line(texts.get(field.name))
            yield ConfigField(section, heading, name, kind, field.default, text, **field.metadata)


def make_config(config_class: type[ConfigT], values: Mapping[str, Any], section: str = "") -> ConfigT:
    """The config of values by name; its `__post_init__` may raise ConfigError."""
    kinds: dict[str, Any] = get_type_hints(config_class)
    made = {}
    for field in fields(config_class):  # type: ignore[arg-type]
        name, kind = f"{section}.{field.name}".lstrip("."), kinds[field.name]
        if is_section(kind):
            made[field.name] = make_config(kind, values, name)
        elif name in values:
            made[field.name] = values[name]
    return config_class(**made)


def is_section(kind: Any) -> bool:
    return is_dataclass(kind)


def field_texts(config_class: type) -> dict[str, str]:
    """The docstring under each field, by the field's name."""
    bodies = [class_bodies(each.__module__).get(each.__name__, []) for each in reversed(config_class.__mro__)]
    return {
        field.target.id: text.value.value
        for body in bodies
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


@cache
def class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    tree = ast.parse("" if module == "builtins" else inspect.getsource(sys.modules[module]))
    return {each.name: each.body for each in tree.body if isinstance(each, ast.ClassDef)}


def alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def fits(value: object, kind: Any) -> bool:
    return any(fits_one(value, each) for each in alternatives(kind))


def fits_one(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(fits(each, *get_args(kind)) for each in value)
    if kind is float and type(value) is int:
        return value.bit_length() < sys.float_info.max_exp
    return type(value) is kind


def in_words(kind: Any, words: Mapping[Any, str], of_choices: Callable[[Sequence[str]], str], between: str) -> str:
    """A type, by the words for each of its alternatives; those without are left out, as null is."""
    literals = [get_args(each) if get_origin(each) is Literal else (words.get(each),) for each in alternatives(kind)]
    return between.join(of_choices(each) if len(each) > 1 else each[0] for each in literals if each[0])


def read_text(text: str) -> Any:
    """What `text` stands for where no text is expected: 3, 1e-4, true, null, [3, 17]."""
    try:
        return load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def as_option(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def on_one_line(docstring: str | None) -> str:
    return " ".join((docstring or "").split())
