"""A config file: YAML in which every key stands once, `1e-4` is a number and a date is text."""

import io
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from cache_store.errors import ConfigError

MAX_VALUE = 200
"""Characters shown of a value: a file may hold any amount."""

MAX_CHARACTERS = 1_000_000
"""Of a config."""

INT, FLOAT, TIMESTAMP, MERGE = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp", "merge"))


class ConfigLoader(yaml.SafeLoader):
    """yaml.YAMLError for a key that its mapping has already; `<<` is a key like others."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
            names.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge nothing: a few lines of merges can fill the memory."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """ValueError for more digits than Python prints; PyYAML reads any number of hexadecimal ones."""
        return int(str(super().construct_yaml_int(node)))


ConfigLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (TIMESTAMP, MERGE)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# PyYAML reads a number without a point, such as 1e-4, as text.
ConfigLoader.add_implicit_resolver(FLOAT, re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), "-+0123456789")
ConfigLoader.add_constructor(INT, ConfigLoader.construct_yaml_int)


def load_yaml(text: str) -> Any:
    """The value that `text` stands for; yaml.YAMLError or ValueError where it stands for none."""
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"more than {MAX_CHARACTERS:,} characters")
    return yaml.load(io.StringIO(text), ConfigLoader)  # errors of a stream quote none of it


def read_config_file(file: str, fields: Collection[str]) -> dict[str, Any]:
    """Its values by the dotted name of their field, out of `fields`."""
    sections = {field.rpartition(".")[0] for field in fields} - {""}
    flat = dict(flattened(read_mapping(file), sections))
    for name in flat:
        if name not in fields:
            raise ConfigError(f"{file}: there is no field {closest_or_all(name, [*fields, *sections])}")
    return flat


def read_mapping(file: str) -> dict[Any, Any]:
    try:
        values = load_yaml(Path(file).read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise ConfigError(f"config: {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        place = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise ConfigError(f"{file} is not UTF-8: {place}; save the file as UTF-8") from None
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply for a config") from None
    except (yaml.YAMLError, ValueError) as error:
        words = " ".join(str(error).replace('in "<file>", ', "at ").split())
        raise ConfigError(f"{file} cannot be read as a config: {shown(words)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no config: expected fields with values, such as `cache: FOLDER`")
    return values


def flattened(values: Mapping[Any, Any], sections: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values; ConfigError for a section that holds no fields."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name not in sections:
            yield name, value
        elif isinstance(value, dict):
            yield from flattened(value, sections, f"{name}.")
        else:
            raise ConfigError(f"{name} is a section of fields, got {shown(value)}; give it fields or leave it out")


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted name, those of a section in a mapping of their own, as in a file."""
    sections: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        section = sections
        for key in path:
            section = section.setdefault(key, {})
        section[last] = value
    return sections


def shown(value: object) -> str:
    """A value as it is typed, cut to a line: aliases let a few bytes of a file stand for gigabytes."""
    if isinstance(value, bool | NoneType):
        return "null" if value is None else str(value).lower()
    text = value if isinstance(value, str) and value.isprintable() else reprlib.repr(value)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"


def closest(name: str, known: Collection[str]) -> str:
    """An unknown name, with the known one that is most like it."""
    return shown(name) + "".join(f"; did you mean {each}?" for each in get_close_matches(name, known, 1))


def closest_or_all(name: str, known: Collection[str]) -> str:
    """An unknown name, dotted or not, with the known one that is most like it, or else with all of its section."""
    said = closest(name, known)
    if said != shown(name):
        return said
    section = f"{name.rpartition('.')[0]}." if "." in name else ""
    there = dict.fromkeys(each.removeprefix(section).partition(".")[0] for each in known if each.startswith(section))
    return f"{said}; there are {', '.join(there)}" if there else said
