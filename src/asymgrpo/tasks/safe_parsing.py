"""SymPy's text parser without `eval`; imported inside a sandbox only.

SymPy turns text into Python and evaluates it, even for `sympy.Number("7")`. `install` puts
`parse_expression` in its place for the whole process: a syntax tree is walked, and only
numbers, names, arithmetic and well-known functions become an expression.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import sympy.parsing.sympy_parser  # type: ignore[import-untyped]

_INTEGER = re.compile(r"\d{1,4000}")
_DECIMAL = re.compile(r"(?:\d{1,4000}\.\d{0,4000}|\.\d{1,4000})(?:[eE][-+]?\d{1,4})?")
_LARGEST_EXPONENT = 10_000

_FUNCTION_NAMES = (
    "sin cos tan cot sec csc asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt "
    "Abs factorial binomial gcd lcm Rational Integer Float Symbol erf Si Ci"
)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(sympy, name) for name in _FUNCTION_NAMES.split()
} | {"abs": sympy.Abs}
_CONSTANTS = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I, "oo": sympy.oo}
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: lambda base, exponent: _power(base, exponent),
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def parse_expression(
    text: str, local_dict: Mapping[str, Any] | None = None, *_: object, **__: object
) -> Any:
    """What `sympy.parse_expr` would return for arithmetic; ValueError for anything else.

    >>> parse_expression("2*x**2 + sin(x)/3")
    2*x**2 + sin(x)/3
    >>> parse_expression("__import__('os').getcwd()")
    Traceback (most recent call last):
    ...
    ValueError: not an arithmetic expression
    """
    text = str(text).strip()
    if _INTEGER.fullmatch(text):
        return sympy.Integer(int(text))
    if _DECIMAL.fullmatch(text):
        return sympy.Float(text)
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("not an arithmetic expression") from None
    return _build(tree.body, text, local_dict or {})


def _build(node: ast.expr, text: str, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return sympy.Integer(node.value)
    if isinstance(node, ast.Constant) and type(node.value) is float:
        return sympy.Float(ast.get_source_segment(text, node) or node.value)
    if isinstance(node, ast.Name):
        named = names.get(node.id, _CONSTANTS.get(node.id))
        return sympy.Symbol(node.id) if named is None else named
    if isinstance(node, ast.UnaryOp | ast.BinOp) and type(node.op) in _OPERATORS:
        sides = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
        return _OPERATORS[type(node.op)](*(_build(side, text, names) for side in sides))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is not None:
            return function(*(_build(argument, text, names) for argument in node.args))
    raise ValueError("not an arithmetic expression")


def _power(base: Any, exponent: Any) -> Any:
    if exponent.is_number and not abs(exponent) <= _LARGEST_EXPONENT:
        raise ValueError("too large an exponent")
    return base**exponent


def _refuse(*_: object, **__: object) -> None:
    raise ValueError("text is never evaluated as Python here")


def install() -> None:
    """Replace SymPy's parser in this process, and shut the way to `eval` behind it."""
    sympy.parse_expr = parse_expression
    sympy.parsing.sympy_parser.parse_expr = parse_expression
    sympy.parsing.sympy_parser.eval_expr = _refuse
