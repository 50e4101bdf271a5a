"""YAML as configs are read: by jsonargparse's own loader, but that a key given twice and huge texts are refused."""

from collections.abc import Iterator
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

MAX_CHARACTERS = 1_000_000
"""Of a config, with every alias written out: a few hundred bytes of aliases can stand for gigabytes."""

load_any = get_loader("yaml")


def load_yaml(text: str) -> Any:
    """As jsonargparse does; yaml.YAMLError for a key that its mapping has already, and for what is too large."""
    root = yaml.compose(text, yaml.SafeLoader) if len(text) <= MAX_CHARACTERS else None
    if len(text) > MAX_CHARACTERS or (root is not None and expanded_size(root, {}) > MAX_CHARACTERS):
        raise yaml.YAMLError(f"more than {MAX_CHARACTERS:,} characters, with its aliases written out")
    for mapping in mappings(root):
        keys = [key for key, _ in mapping.value if isinstance(key, yaml.ScalarNode)]
        names = [key.value for key in keys]
        for position, key in enumerate(keys):
            if key.value in names[:position]:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
    return load_any(text)


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


def mappings(root: yaml.Node | None) -> Iterator[yaml.MappingNode]:
    """Every mapping, each once: an alias stands for the node itself."""
    nodes, known = [root], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in known or not isinstance(node, yaml.CollectionNode):
            continue
        known.add(id(node))
        if isinstance(node, yaml.MappingNode):
            yield node
        nodes += children(node)


def use_for_configs() -> None:
    set_loader("yaml", load_yaml, exceptions=(yaml.YAMLError,))
