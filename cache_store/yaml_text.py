"""YAML as configs are read: by jsonargparse's own loader, but that a key given twice is refused."""

from collections.abc import Iterator
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

load_any = get_loader("yaml")


def load_yaml(text: str) -> Any:
    """As jsonargparse does; yaml.YAMLError, with its place, for a key that its mapping has already."""
    for mapping in mappings(text):
        keys = [key for key, _ in mapping.value if isinstance(key, yaml.ScalarNode)]
        names = [key.value for key in keys]
        for position, key in enumerate(keys):
            if key.value in names[:position]:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
    return load_any(text)


def mappings(text: str) -> Iterator[yaml.MappingNode]:
    """Every mapping, each once: an alias stands for the node itself."""
    nodes, known = [yaml.compose(text, yaml.SafeLoader)], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in known or not isinstance(node, yaml.CollectionNode):
            continue
        known.add(id(node))
        if isinstance(node, yaml.MappingNode):
            yield node
            nodes += [value for _, value in node.value]
        else:
            nodes += node.value


def use_for_configs() -> None:
    set_loader("yaml", load_yaml, exceptions=(yaml.YAMLError,))
