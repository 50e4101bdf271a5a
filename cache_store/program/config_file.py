"""Configs: frozen dataclasses of values and of sections, read from YAML and options.

Type, default and docstring of a field are written once, in the dataclass; options, help and checks come from there. In
YAML no key may repeat, `1e-4` is a number, and a date is text.
"""

import ast
import inspect
import io
import re
import reprlib
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from cache_store.errors import ConfigError

MAX_VALUE = 200
"""Characters shown of a value, which may have any length in a file."""

MAX_BYTES = 1_000_000
"""Most bytes of a config file."""

FLOAT, TIMESTAMP, MERGE = (f"tag:yaml.org,2002:{kind}" for kind in ("float", "timestamp", "merge"))


class ConfigLoader(yaml.SafeLoader):
    """A loader that refuses a repeated key and takes `<<` as an ordinary key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
            names.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Do not merge: a few lines of merges can fill the memory."""


ConfigLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (TIMESTAMP, MERGE)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# Without this, PyYAML reads a number that has no point, such as 1e-4, as text.
ConfigLoader.add_implicit_resolver(FLOAT, re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), "-+0123456789")


def load_yaml(text: str) -> Any:
    return yaml.load(io.StringIO(text), ConfigLoader)  # errors about a stream do not quote its text


def read_config_file(file: str, fields: Collection[str]) -> dict[str, Any]:
    """Read a config file's values by dotted field name; ConfigError for a name that is not in `fields`."""
    sections = {field.rpartition(".")[0] for field in fields} - {""}
    flat = dict(flatten_sections(read_mapping(file), sections))
    for name in flat:
        if name not in fields:
            raise ConfigError(f"{file}: there is no field {suggest_or_list(name, [*fields, *sections])}")
    return flat


def read_mapping(file: str) -> dict[Any, Any]:
    try:
        with Path(file).open("rb") as stream:  # a pipe has no size, and /dev/zero no end
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{file} is no config: it has more than {MAX_BYTES:,} bytes")
        values = load_yaml(data.decode())
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise ConfigError(f"config: {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        place = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise ConfigError(f"{file} is not UTF-8: {place}; save the file as UTF-8") from None
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply for a config") from None
    except (yaml.YAMLError, ValueError) as error:
        words = " ".join(str(error).replace('in "<file>", ', "at ").split())
        raise ConfigError(f"{file} cannot be read as a config: {format_value(words)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} is not a config: expected fields with values, such as `cache: FOLDER`")
    return values


def flatten_sections(
    values: Mapping[Any, Any], sections: Collection[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name not in sections:
            yield name, value
        elif isinstance(value, dict):
            yield from flatten_sections(value, sections, f"{name}.")
        else:
            raise ConfigError(f"{name} is a section, got {format_value(value)}; give it fields or leave it out")


def nest_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn values by dotted name into nested mappings, as in a file."""
    sections: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        section = sections
        for key in path:
            section = section.setdefault(key, {})
        section[last] = value
    return sections


def format_value(value: object) -> str:
    """Format a value as it is typed, cut to one line: YAML aliases can turn a few bytes into gigabytes."""
    if isinstance(value, bool | NoneType):
        return "null" if value is None else str(value).lower()
    text = value if isinstance(value, str) and value.isprintable() else reprlib.repr(value)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"


def suggest(name: str, known: Collection[str], otherwise: str = "") -> str:
    similar = get_close_matches(name, known, 1)
    return format_value(name) + (f"; did you mean {similar[0]}?" if similar else otherwise)


def suggest_or_list(name: str, known: Collection[str]) -> str:
    """Format an unknown name, followed by the most similar known one, or else by all names of its section."""
    section = f"{name.rpartition('.')[0]}." if "." in name else ""
    there = dict.fromkeys(each.removeprefix(section).partition(".")[0] for each in known if each.startswith(section))
    return suggest(name, known, f"; there are {', '.join(there)}" if there else "")


WORDS = {
    int: ("N", "a whole number"),
    float: ("NUMBER", "a number"),
    str: ("", "text"),
    bool: ("{true,false}", "true or false"),
    list[int]: ("[N,…]", "a list of whole numbers, as [0,17]"),
    list[str]: ("[TEXT,…]", "a list of texts, as [a,b]"),
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
    option: str
    """The option and its value, `--store.codec {none,zstd}`; a switch has no value: `--decode`."""

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def help(self) -> str:
        """The docstring and the default, unless that is null, which the docstring explains."""
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
        raise ConfigError(f"{self.name} must be {expected}, got {format_value(value)}")

    def read_section(self, entry: type, name: str, value: Any) -> dict[str, Any]:
        section = f"{self.name}.{name}"
        if not isinstance(value, dict):
            raise ConfigError(f"{section} is a section, got {format_value(value)}; give it fields or leave it out")
        fields = {each.name: each for each in config_fields(entry, section)}
        for key in value:
            if f"{section}.{key}" not in fields:
                raise ConfigError(f"there is no field {suggest(f'{section}.{key}', fields)}")
        for missing in (key for key, each in fields.items() if each.required and key.rpartition(".")[2] not in value):
            raise ConfigError(f"{missing} is missing; give it a value")
        return {str(key): fields[f"{section}.{key}"].read(each) for key, each in value.items()}


def section_of_each(kind: Any) -> type | None:
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
            default = field.default if field.default_factory is MISSING else field.default_factory()
            yield ConfigField(section, heading, name, kind, default, on_one_line(texts.get(field.name)), option)


def field_texts(config_class: type) -> dict[str, str]:
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
            assert each in WORDS, f"a config has no fields of type {each}; see WORDS"
            yield WORDS[each]


def read_text(text: str) -> Any:
    """Parse `text` as YAML, such as 3, 1e-4, null or [3, 17]; return it unchanged if it is not YAML."""
    try:
        return load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def on_one_line(docstring: str | None) -> str:
    return " ".join((docstring or "").split())
