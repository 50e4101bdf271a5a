"""The fields of a config: a frozen dataclass of values and of sections, which are frozen dataclasses too.

A field's type, default and docstring stand in the dataclass alone; options, help and checks follow from them.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from cache_store.errors import ConfigError
from cache_store.program.config_file import closest, load_yaml, shown

WORDS = {
    int: ("N", "a whole number"),
    float: ("NUMBER", "a number"),
    str: ("", "text"),
    bool: ("{true,false}", "true or false"),
    list[int]: ("[N,…]", "a list of whole numbers"),
    dict[str, str]: ("{NAME: …}", "a mapping, {NAME: …, NAME: …}"),
}
"""A type in the help, where text is named by its field, and in an error."""


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
    instead: tuple[str, ...]
    """Other fields: the config needs one of all."""
    typed: str
    """Its option with what follows it, `--store.codec {none,zstd}`; alone where it switches on: `--decode`."""

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def help(self) -> str:
        """The docstring and the default, unless that is null: the docstring says what null means."""
        if " " not in self.typed or self.default is None:
            return self.text
        return f"{self.text} ({'required' if self.required else f'default: {shown(self.default)}'})"

    def read(self, value: Any) -> Any:
        """A value of a file or of the command line in the field's type; ConfigError where it does not fit."""
        meanings = [value, read_text(value)] if isinstance(value, str) else [value]
        for meaning in meanings:
            if (entry := section_of_each(self.kind)) and isinstance(meaning, dict):
                return {str(name): self.read_section(entry, str(name), each) for name, each in meaning.items()}
        if value == "null":
            meanings.reverse()  # text only where nothing may be null
        for meaning in meanings:
            with suppress(msgspec.ValidationError):
                return msgspec.convert(meaning, self.kind)
        if None in meanings:
            raise ConfigError(f"{self.name} cannot be null; give it a value, or leave it out for its default")
        expected = " or ".join(said for _, said in in_words(self.kind))
        raise ConfigError(f"{self.name} must be {expected}, got {shown(value)}{self.as_list(value)}")

    def as_list(self, value: Any) -> str:
        """The list that may be meant, where one of its entries, or none, was given for it."""
        with suppress(msgspec.ValidationError):
            msgspec.convert(meant := [] if value == "none" else [value], self.kind)
            return f"; did you mean [{', '.join(map(shown, meant))}]?"
        return ""

    def read_section(self, entry: type, name: str, value: Any) -> dict[str, Any]:
        """A section's values by field, of a field that maps names to sections; ConfigError for one that has none."""
        section = f"{self.name}.{name}"
        if not isinstance(value, dict):
            raise ConfigError(f"{section} is a section of fields, got {shown(value)}; give it fields or leave it out")
        fields = {each.name: each for each in config_fields(entry, section)}
        for key in value:
            if f"{section}.{key}" not in fields:
                raise ConfigError(f"there is no field {closest(f'{section}.{key}', fields)}")
        return {str(key): fields[f"{section}.{key}"].read(each) for key, each in value.items()}


def section_of_each(kind: Any) -> type | None:
    """The dataclass of each value, where a field's type maps names to sections of fields."""
    for each in alternatives(kind):
        if get_origin(each) is dict and is_dataclass(section := get_args(each)[1]):
            return section if isinstance(section, type) else None
    return None


def alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def config_fields(config_class: type, section: str = "") -> Iterator[ConfigField]:
    """Every field of a config, those of a section in its place."""
    kinds: dict[str, Any] = get_type_hints(config_class)
    texts, heading = field_texts(config_class), on_one_line(config_class.__doc__)
    for field in fields(config_class):
        name, kind = f"{section}.{field.name}".lstrip("."), kinds[field.name]
        if is_dataclass(kind):
            yield from config_fields(kinds[field.name], name)
        else:
            metavar = "|".join(word for word, _ in in_words(kind) if word) or field.name.upper()
            typed = field.metadata.get("typed", f"--{name} {metavar}")
            text, instead = on_one_line(texts.get(field.name)), field.metadata.get("instead", ())
            yield ConfigField(section, heading, name, kind, field.default, text, instead, typed)


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


def in_words(kind: Any) -> Iterator[tuple[str, str]]:
    """Each alternative of a type but null, in the help and in an error."""
    for each in alternatives(kind):
        if section_of_each(each):
            yield "{NAME: {…}}", "a mapping of names to sections of fields"
        elif get_origin(each) is Literal:
            choices = get_args(each)
            yield (f"{{{','.join(choices)}}}", f"one of {', '.join(choices)}") if len(choices) > 1 else choices * 2
        elif get_origin(each) is list and each not in WORDS:
            yield from ((f"[{word},…]", f"a list, each {said}") for word, said in in_words(*get_args(each)))
        elif each is not NoneType:
            yield WORDS[each]


def read_text(text: str) -> Any:
    """What `text` stands for where no text is expected: 3, 1e-4, true, null, [3, 17]."""
    try:
        return load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def on_one_line(docstring: str | None) -> str:
    return " ".join((docstring or "").split())
