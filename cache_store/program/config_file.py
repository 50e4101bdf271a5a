"""A config file: YAML of bounded size with every key once, in which `1e-4` is a number and a date is text."""

import io
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cache_store.errors import ConfigError

MAX_VALUE = 200
"""Characters shown of a value: a file may hold any amount."""

MAX_CHARACTERS = 1_000_000
"""Of a config, with every alias written out: a few hundred bytes of aliases can stand for gigabytes."""

FLOAT, TIMESTAMP = "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"


class ConfigLoader(yaml.SafeLoader):
    """yaml.YAMLError for a key that its mapping has already, and for what is too large."""

    def get_single_node(self) -> yaml.Node | None:
        root = super().get_single_node()
        if root is not None and expanded_size(root, {}) > MAX_CHARACTERS:
            raise too_large()
        return root

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
            names.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        return super().construct_mapping(node, deep)


ConfigLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != TIMESTAMP]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# PyYAML reads a number without a point, such as 1e-4, as text.
ConfigLoader.add_implicit_resolver(FLOAT, re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), "-+0123456789")


def load_yaml(text: str) -> Any:
    """The value that `text` stands for; yaml.YAMLError or ValueError where it stands for none."""
    if len(text) > MAX_CHARACTERS:
        raise too_large()
    return yaml.load(io.StringIO(text), ConfigLoader)  # errors of a stream quote none of it


def too_large() -> yaml.YAMLError:
    return yaml.YAMLError(f"more than {MAX_CHARACTERS:,} characters, with its aliases written out")


def expanded_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Characters of a node with every alias written out; `sizes` remembers them by node."""
    if id(node) not in sizes:
        sizes[id(node)] = MAX_CHARACTERS + 1  # while it is open: a node that holds itself has no end
        sizes[id(node)] = 1 + (
            sum(expanded_size(child, sizes) for child in children(node))
            if isinstance(node, yaml.CollectionNode)
            else len(node.value)
        )
    return sizes[id(node)]


def children(node: yaml.CollectionNode) -> list[yaml.Node]:
    return [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else node.value


def read_config_file(file: str, fields: Collection[str]) -> dict[str, Any]:
    """Its values by the dotted name of their field, out of `fields`."""
    values = read_mapping(file)
    sections = {field.rpartition(".")[0] for field in fields} - {""}
    flat = dict(flattened(values, sections))
    for name in flat:
        if name not in fields:
            raise ConfigError(f"{file}: there is no field {shortened(name)}")
    return flat


def read_mapping(file: str) -> dict[Any, Any]:
    try:
        values = load_yaml(Path(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config: {file} does not exist") from None
    except IsADirectoryError:
        raise ConfigError(f"config: {file} is not a file") from None
    except UnicodeDecodeError as error:
        place = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise ConfigError(f"{file} is not UTF-8: {place}; save the file as UTF-8") from None
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply for a config") from None
    except (yaml.YAMLError, ValueError) as error:
        words = " ".join(str(error).replace('in "<file>", ', "at ").split())
        raise ConfigError(f"{file} cannot be read as a config: {shortened(words)}") from None
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
            found = "nothing" if value is None else shortened(repr(value))
            raise ConfigError(f"{name} is a section of fields, got {found}; give it fields or leave it out")


def shortened(text: str) -> str:
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"


def as_yaml(values: Mapping[str, Any]) -> str:
    """A config file of values by dotted name."""
    sections: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        section = sections
        for key in path:
            section = section.setdefault(key, {})
        section[last] = value
    return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)
