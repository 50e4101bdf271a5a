"""The fields of a config: a frozen dataclass of values and of sections, which are frozen dataclasses too.

Type, default and docstring of a field are written once, in the dataclass; options, help and checks come from there.
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
from cache_store.program.config_file import closest, format_value, load_yaml

WORDS = {
    int: ("N", "a whole number"),
    float: ("NUMBER", "a number"),
    str: ("", "text"),
    bool: ("{true,false}", "true or false"),
    list[int]: ("[N,…]", "a list of whole numbers"),
    dict[str, str]: ("{NAME: …}", "a mapping, {NAME: …, NAME: …}"),
}
"""Names of a type in the help (text uses the field's name) and in an error."""


@dataclass(frozen=True)
class ConfigField:
    """A field of a config or of one of its sections."""

    section: str
    """Empty for the config's own fields."""
    heading: str
    """The docstring of the section."""
    name: str
    """The dotted name: `store.codec`."""
    kind: Any
    """The field's type."""
    default: Any
    """MISSING if a value is required."""
    text: str
    """The docstring under the field."""
    alternatives: tuple[str, ...]
    """Fields that may be given in place of this one; the config needs at least one of them all."""
    option: str
    """The option and its value, `--store.codec {none,zstd}`; a switch has no value: `--decode`."""

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def help(self) -> str:
        """The docstring and the default; a default of null is left out, since the docstring explains it."""
        if " " not in self.option or self.default is None:
            return self.text
        return f"{self.text} ({'required' if self.required else f'default: {format_value(self.default)}'})"

    def read(self, value: Any) -> Any:
        """Convert a value of a file or the command line to the field's type; ConfigError if it does not fit."""
        meanings = [value, read_text(value)] if isinstance(value, str) else [value]
        for meaning in meanings:
            if (entry := section_of_each(self.kind)) and isinstance(meaning, dict):
                return {str(name): self.read_section(entry, str(name), each) for name, each in meaning.items()}
        if value == "null":
            meanings.reverse()  # null wins over the text "null" if the field allows it
        for meaning in meanings:
            with suppress(msgspec.ValidationError):
                return msgspec.convert(meaning, self.kind)
        if None in meanings:
            raise ConfigError(f"{self.name} cannot be null; give it a value, or leave it out for its default")
        expected = " or ".join(phrase for _, phrase in type_names(self.kind))
        raise ConfigError(f"{self.name} must be {expected}, got {format_value(value)}{self.as_list(value)}")

    def as_list(self, value: Any) -> str:
        """Suggest a list if a single entry, or `none`, was given instead of one."""
        with suppress(msgspec.ValidationError):
            msgspec.convert(meant := [] if value == "none" else [value], self.kind)
            return f"; did you mean [{', '.join(map(format_value, meant))}]?"
        return ""

    def read_section(self, entry: type, name: str, value: Any) -> dict[str, Any]:
        """Convert a named section's values by field; ConfigError for an unknown field or if it is not a section."""
        section = f"{self.name}.{name}"
        if not isinstance(value, dict):
            raise ConfigError(f"{section} is a section, got {format_value(value)}; give it fields or leave it out")
        fields = {each.name: each for each in config_fields(entry, section)}
        for key in value:
            if f"{section}.{key}" not in fields:
                raise ConfigError(f"there is no field {closest(f'{section}.{key}', fields)}")
        return {str(key): fields[f"{section}.{key}"].read(each) for key, each in value.items()}


def section_of_each(kind: Any) -> type | None:
    """Return the dataclass of the sections if a field's type maps names to sections, else None."""
    for each in union_members(kind):
        if get_origin(each) is dict and is_dataclass(section := get_args(each)[1]):
            return section if isinstance(section, type) else None
    return None


def union_members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def config_fields(config_class: type, section: str = "") -> Iterator[ConfigField]:
    """Yield every field of a config; a section is replaced by its fields."""
    kinds: dict[str, Any] = get_type_hints(config_class)
    texts, heading = field_texts(config_class), on_one_line(config_class.__doc__)
    for field in fields(config_class):
        name, kind = f"{section}.{field.name}".lstrip("."), kinds[field.name]
        if is_dataclass(kind):
            yield from config_fields(kinds[field.name], name)
        else:
            metavar = "|".join(word for word, _ in type_names(kind) if word) or field.name.upper()
            option = field.metadata.get("option", f"--{name} {metavar}")
            text, alternatives = on_one_line(texts.get(field.name)), field.metadata.get("alternatives", ())
            yield ConfigField(section, heading, name, kind, field.default, text, alternatives, option)


def field_texts(config_class: type) -> dict[str, str]:
    """Return the docstring under each field, by the field's name."""
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


def type_names(kind: Any) -> Iterator[tuple[str, str]]:
    """Yield each alternative of a type except null, as written in the help and in an error."""
    for each in union_members(kind):
        if section_of_each(each):
            yield "{NAME: {…}}", "a mapping of names to sections of fields"
        elif get_origin(each) is Literal:
            choices = get_args(each)
            yield (f"{{{','.join(choices)}}}", f"one of {', '.join(choices)}") if len(choices) > 1 else choices * 2
        elif get_origin(each) is list and each not in WORDS:
            yield from ((f"[{word},…]", f"a list, each {phrase}") for word, phrase in type_names(*get_args(each)))
        elif each is not NoneType:
            yield WORDS[each]


def read_text(text: str) -> Any:
    """Parse `text` as YAML, such as 3, 1e-4, true, null or [3, 17]; return it unchanged if it is not YAML."""
    try:
        return load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def on_one_line(docstring: str | None) -> str:
    return " ".join((docstring or "").split())
