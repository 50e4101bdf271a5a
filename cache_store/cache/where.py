"""Choose samples by an expression over their columns: `score > 5 and split == "train"`.

The expression is parsed by Python's own grammar, of which only comparisons, `and`, `or`, `not`, `in`, `is null` and
parentheses are allowed, and computed by Arrow; nothing is evaluated as Python. As in SQL, a comparison with an absent
value is neither true nor false, and a sample is chosen only if the whole expression is true.
"""

import ast
import operator
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

NUMBERS = "\n"
"""Name of a column of sample numbers; no other can have it."""

COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
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


def numbers_where(cache: Samples, text: str) -> NDArray[np.int64]:
    """Return the numbers of the samples for which an expression is true, ascending: int64 [chosen]; or ConfigError."""
    condition, columns = parse(text, cache.columns)
    chosen = [np.empty(0, np.int64)]
    for first in range(0, len(cache), ROWS_AT_ONCE):
        numbers = np.arange(first, min(first + ROWS_AT_ONCE, len(cache)))
        table = cache.samples(numbers, columns)
        try:
            found = table.append_column(NUMBERS, pa.array(numbers)).filter(condition)
        except pa.ArrowException:
            kinds = ", ".join(f"{name} is {table.schema.field(name).type}" for name in columns)
            raise ConfigError(f"where: {text[:80]!r} compares other kinds: {kinds}") from None
        chosen.append(found[NUMBERS].to_numpy())
    return np.concatenate(chosen)


def refuse_unknown_columns(call: str, names: object, known: list[str]) -> None:
    """Raise ConfigError, with the columns that there are, unless the names are a list of some of these."""
    if not isinstance(names, list | tuple):
        raise ConfigError(f"{call}: expected a list of columns, got {names!r}; columns are {', '.join(known)}")
    for name in names:
        if name not in known:
            raise ConfigError(f"{call}: there is no column {name}; columns are {', '.join(known)}")


class Unreadable(Exception):  # noqa: N818
    """Part of an expression that is not allowed there."""


def parse(text: str, known: list[str]) -> tuple[pc.Expression, list[str]]:
    """Parse an expression; return it with its columns. ConfigError says where it cannot be read."""
    if not isinstance(text, str):
        raise ConfigError(f"where: {EXAMPLE}, got {text!r}")
    if len(text := text.strip()) > MAX_CHARACTERS:
        raise ConfigError(f"where: the expression has {len(text):,} characters, at most {MAX_CHARACTERS:,} are allowed")
    line = text.replace("\n", " ")
    try:
        root = ast.parse(line, mode="eval").body
        names = [node.id for node in ast.walk(root) if isinstance(node, ast.Name) and node.id != "null"]
        refuse_unknown_columns("where", names, known)
        if not names:
            raise Unreadable(root)
        return logical(root), [*dict.fromkeys(names)]
    except Unreadable as error:
        character = len(line.encode()[: error.args[0].col_offset].decode()) + 1  # offsets count bytes
    except PARSE_ERRORS as error:
        character = getattr(error, "offset", None) or len(line) + 1
    raise ConfigError(f"where: {text[:80]!r} cannot be read at character {character}; {EXAMPLE}")


def logical(node: ast.expr) -> pc.Expression:
    """Return what is true, false or null of each row."""
    match node:
        case ast.BoolOp(op, values):
            return reduce(operator.and_ if isinstance(op, ast.And) else operator.or_, map(logical, values))
        case ast.UnaryOp(ast.Not(), operand):
            return ~logical(operand)
        case ast.Compare(left, operators, others):
            pairs = zip([left, *others], operators, others, strict=False)
            return reduce(operator.and_, [compared(*pair) for pair in pairs])
        case ast.Name(name):
            return pc.field(name) == True  # noqa: E712 (an expression)
    raise Unreadable(node)


def compared(left: ast.expr, comparison: ast.cmpop, right: ast.expr) -> pc.Expression:
    if isinstance(comparison, ast.Is | ast.IsNot):
        if not is_null(right):
            raise Unreadable(right)
        found = operand(left).is_null()
    elif isinstance(comparison, ast.In | ast.NotIn):
        if not isinstance(right, ast.List | ast.Tuple) or not right.elts:
            raise Unreadable(right)
        found = reduce(operator.or_, [operand(left) == literal(each) for each in right.elts])
    else:
        found = COMPARISONS[type(comparison)](operand(left), operand(right))
    return ~found if isinstance(comparison, ast.IsNot | ast.NotIn) else found


def operand(node: ast.expr) -> pc.Expression:
    return pc.field(node.id) if isinstance(node, ast.Name) and not is_null(node) else pc.scalar(literal(node))


def literal(node: ast.expr) -> str | float:
    """Return the value of a text, a number, True or False."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        raise Unreadable(node) from None
    if isinstance(value, str | float) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return value
    raise Unreadable(node)


def is_null(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == "null") or (isinstance(node, ast.Constant) and node.value is None)
