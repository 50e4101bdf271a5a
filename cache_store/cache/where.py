"""Choose samples by an expression over their columns: `score > 5 and split == "train"`.

The expression is parsed by Python's own grammar, of which only comparisons, `and`, `or`, `not`, `in`, `is null` and
parentheses are allowed, and computed by Arrow; nothing is evaluated as Python. As in SQL, a comparison with an absent
value is neither true nor false, and a sample is chosen only if the whole expression is true.
"""

import ast
from collections.abc import Callable
from functools import reduce
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache_store.errors import ConfigError

ROWS_AT_ONCE = 2**16
"""Samples whose columns are in memory at a time."""

MAX_CHARACTERS = 10_000
"""Longest expression."""

COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}

EXAMPLE = "expected comparisons such as score > 5 and split in ['train', 'val'] or score is null"

PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors of Python's parser, for invalid, very large or deeply nested text."""


class Samples(Protocol):
    """A cache, or joined caches."""

    @property
    def columns(self) -> list[str]: ...

    def __len__(self) -> int: ...

    def samples(self, numbers: np.ndarray, columns: list[str]) -> pa.Table: ...


def numbers_where(cache: Samples, expression: str) -> NDArray[np.int64]:
    """Return the numbers of the samples for which an expression is true, ascending: int64 [chosen].

    ConfigError for an unknown column, for an expression that cannot be read, or values that cannot be compared.
    """
    condition = Condition(expression, cache.columns)
    chosen = [np.empty(0, np.int64)]
    for first in range(0, len(cache), ROWS_AT_ONCE):
        numbers = np.arange(first, min(first + ROWS_AT_ONCE, len(cache)))
        chosen.append(numbers[condition(cache.samples(numbers, condition.columns))])
    return np.concatenate(chosen)


def refuse_unknown_columns(call: str, names: object, known: list[str]) -> None:
    """Raise ConfigError, with the columns that there are, unless the names are a list of some of these."""
    if not isinstance(names, list | tuple):
        raise ConfigError(f"{call}: expected a list of columns, got {names!r}; columns are {', '.join(known)}")
    for name in names:
        if name not in known:
            raise ConfigError(f"{call}: there is no column {name}; columns are {', '.join(known)}")


class Condition:
    """An expression that is true, false or unknown of each row of a table."""

    def __init__(self, text: str, known: list[str]) -> None:
        """Parse the text; ConfigError names an unknown column, or the place of what cannot be read."""
        if not isinstance(text, str):
            raise ConfigError(f"where: {EXAMPLE}, got {text!r}")
        self._text = text = text.strip()
        if len(text) > MAX_CHARACTERS:
            raise ConfigError(
                f"where: the expression has {len(text):,} characters, at most {MAX_CHARACTERS:,} are allowed"
            )
        try:
            self._root = ast.parse(text, mode="eval").body
            names = [node.id for node in ast.walk(self._root) if isinstance(node, ast.Name) and node.id != "null"]
        except PARSE_ERRORS as error:
            line, offset = getattr(error, "lineno", None), getattr(error, "offset", None)
            raise self._unreadable(self._before(line or 1) + offset if offset else len(text) + 1) from None
        refuse_unknown_columns("where", names, known)
        self.columns = [*dict.fromkeys(names)]
        if not self.columns:
            raise self._unreadable(1)

    def __call__(self, table: pa.Table) -> NDArray[np.bool_]:
        """Return of which rows it is true, [N]; ConfigError if values cannot be compared."""
        try:
            found = self._logical(self._root, table)
            is_true: NDArray[np.bool_] = pc.fill_null(found, False).to_numpy(zero_copy_only=False)
        except (pa.ArrowException, RecursionError) as error:
            kinds = ", ".join(f"{name} is {table.schema.field(name).type}" for name in self.columns)
            problem = "is nested too deeply" if isinstance(error, RecursionError) else f"compares other kinds: {kinds}"
            raise ConfigError(f"where: {shown(self._text)} {problem}") from None
        return is_true

    def _logical(self, node: ast.expr, table: pa.Table) -> pa.ChunkedArray:
        """Compute what is true, false or null of each row."""
        if isinstance(node, ast.BoolOp):
            join = pc.and_kleene if isinstance(node.op, ast.And) else pc.or_kleene
            return reduce(join, [self._logical(each, table) for each in node.values])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return pc.invert(self._logical(node.operand, table))
        if isinstance(node, ast.Compare):
            pairs = zip([node.left, *node.comparators], node.ops, node.comparators, strict=False)
            return reduce(pc.and_kleene, [self._compared(*pair, table) for pair in pairs])
        if isinstance(node, ast.Name):
            return pc.equal(table[node.id], True)
        raise self._unreadable(node)

    def _compared(self, left: ast.expr, operator: ast.cmpop, right: ast.expr, table: pa.Table) -> Any:
        is_negated = isinstance(operator, ast.IsNot | ast.NotIn)
        if isinstance(operator, ast.Is | ast.IsNot):
            if not is_null(right):
                raise self._unreadable(right)
            found = pc.is_null(self._operand(left, table))
        elif isinstance(operator, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple) or not right.elts:
                raise self._unreadable(right)
            column = self._operand(left, table)
            found = reduce(pc.or_kleene, [pc.equal(column, self._literal(each)) for each in right.elts])
        else:
            found = COMPARISONS[type(operator)](self._operand(left, table), self._operand(right, table))
        return pc.invert(found) if is_negated else found

    def _operand(self, node: ast.expr, table: pa.Table) -> Any:
        return table[node.id] if isinstance(node, ast.Name) and not is_null(node) else self._literal(node)

    def _literal(self, node: ast.expr) -> Any:
        """Return the value of a text, a number, True or False."""
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError):
            raise self._unreadable(node) from None
        if not isinstance(value, str | float | int) or (isinstance(value, int) and not -(2**63) <= value < 2**63):
            raise self._unreadable(node)
        return pa.scalar(value)

    def _unreadable(self, place: ast.expr | int) -> ConfigError:
        character = place
        if isinstance(place, ast.expr):  # its offset counts bytes of its line
            line = self._text.splitlines()[place.lineno - 1].encode()
            character = self._before(place.lineno) + len(line[: place.col_offset].decode()) + 1
        return ConfigError(f"where: {shown(self._text)} cannot be read at character {character}; {EXAMPLE}")

    def _before(self, line: int) -> int:
        """Return the number of characters before a line, counted from 1."""
        return sum(map(len, self._text.splitlines(keepends=True)[: line - 1]))


def is_null(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == "null") or (isinstance(node, ast.Constant) and node.value is None)


def shown(text: str) -> str:
    return repr(text[:80])
