"""Read a config file: YAML without repeated keys, where `1e-4` is a number and a date is text."""

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
"""Characters shown of a value, which may have any length in a file."""

MAX_CHARACTERS = 1_000_000
"""Most characters of a config file."""

INT, FLOAT, TIMESTAMP, MERGE = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp", "merge"))


class ConfigLoader(yaml.SafeLoader):
    """A loader that raises yaml.YAMLError for a repeated key and treats `<<` as an ordinary key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
            names.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Do not merge: a few lines of merges can fill the memory."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Read an integer; ValueError if it has more digits than Python prints, as a long hexadecimal number may."""
        return int(str(super().construct_yaml_int(node)))


ConfigLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (TIMESTAMP, MERGE)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# Without this, PyYAML reads a number that has no point, such as 1e-4, as text.
ConfigLoader.add_implicit_resolver(FLOAT, re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), "-+0123456789")
ConfigLoader.add_constructor(INT, ConfigLoader.construct_yaml_int)


def load_yaml(text: str) -> Any:
    """Parse `text` as YAML; yaml.YAMLError or ValueError if it is invalid or too long."""
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"more than {MAX_CHARACTERS:,} characters")
    return yaml.load(io.StringIO(text), ConfigLoader)  # errors about a stream do not quote its text


def read_config_file(file: str, fields: Collection[str]) -> dict[str, Any]:
    """Read a config file's values by dotted field name; ConfigError for a name that is not in `fields`."""
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
        raise ConfigError(f"{file} cannot be read as a config: {format_value(words)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} is not a config: expected fields with values, such as `cache: FOLDER`")
    return values


def flattened(values: Mapping[Any, Any], sections: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values; ConfigError for a section whose value is not a mapping."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name not in sections:
            yield name, value
        elif isinstance(value, dict):
            yield from flattened(value, sections, f"{name}.")
        else:
            raise ConfigError(f"{name} is a section, got {format_value(value)}; give it fields or leave it out")


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn values by dotted name into nested mappings, one per section, as in a file."""
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


def closest(name: str, known: Collection[str]) -> str:
    """Format an unknown name, followed by the most similar known one, if any."""
    return format_value(name) + "".join(f"; did you mean {each}?" for each in get_close_matches(name, known, 1))


def closest_or_all(name: str, known: Collection[str]) -> str:
    """Format an unknown name, followed by the most similar known one, or else by all names of its section."""
    suggestion = closest(name, known)
    if suggestion != format_value(name):
        return suggestion
    section = f"{name.rpartition('.')[0]}." if "." in name else ""
    there = dict.fromkeys(each.removeprefix(section).partition(".")[0] for each in known if each.startswith(section))
    return f"{suggestion}; there are {', '.join(there)}" if there else suggestion
