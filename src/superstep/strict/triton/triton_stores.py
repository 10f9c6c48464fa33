"""Arguments that a Triton kernel writes through, from its source: the device must know them before the kernel runs.

Each name stands for the parameters that its value is made of; a loaded value is made of none. A parameter that may
reach the address of a store, in the kernel or in a function that it calls, counts as written.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

STORES = ("store", "atomic_")
"""Prefixes of Triton's writing functions."""


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """Uses of a function's parameters.

    Attributes:
        stored: those that it may write through.
        returned: those that its result is made of.
    """

    stored: frozenset[str]
    returned: frozenset[str]


@cache
def parameter_use(kernel: Callable[..., Any]) -> ParameterUse:
    """Uses of the parameters of a function in Triton's language."""
    text = _KernelText(kernel)
    returned = (node.value for node in ast.walk(text.function) if isinstance(node, ast.Return) and node.value)
    calls = (node for node in ast.walk(text.function) if isinstance(node, ast.Call))
    return ParameterUse(
        stored=text.parameters(*(address for call in calls for address in text.list_stored_arguments(call))),
        returned=text.parameters(*returned),
    )


class _KernelText:
    """A function's source.

    Attributes:
        function: its tree.
    """

    def __init__(self, kernel: Callable[..., Any]) -> None:
        (self.function,) = ast.parse(textwrap.dedent(inspect.getsource(kernel))).body
        self._globals: Mapping[str, Any] = kernel.__globals__
        self._made_of = {name: frozenset({name}) for name in inspect.signature(kernel).parameters}
        assignments, size = list(_assignments(self.function)), -1
        while size < (size := sum(map(len, self._made_of.values()))):  # loops pass values upwards
            for name, value in assignments:
                self._made_of[name] = self._made_of.get(name, frozenset()) | self.parameters(value)

    def parameters(self, *values: ast.AST) -> frozenset[str]:
        """The parameters that values are made of."""
        return frozenset[str]().union(*map(self._parameters, values))

    def _parameters(self, value: ast.AST) -> frozenset[str]:
        match value:
            case ast.Name(id=name):
                return self._made_of.get(name, frozenset())
            case ast.Call() if _word(value.func) == "load":
                return frozenset()
            case ast.Call() if (called := self._find_function(value.func)) is not None:
                return self.parameters(*_match_arguments(value, called, parameter_use(called).returned))
            case _:
                return self.parameters(*ast.iter_child_nodes(value))

    def list_stored_arguments(self, call: ast.Call) -> list[ast.expr]:
        """Arguments that a call writes through: the address of a store, or those that the called function writes
        through.
        """
        if _word(call.func).startswith(STORES):
            return [call.func, *call.args[:1], *(each.value for each in call.keywords if each.arg == "pointer")]
        called = self._find_function(call.func)
        return [] if called is None else _match_arguments(call, called, parameter_use(called).stored)

    def _find_function(self, name: ast.expr) -> Callable[..., Any] | None:
        """The Python function of a call; None for Triton's own."""
        match name:
            case ast.Name(id=word):
                value = self._globals.get(word)
            case ast.Attribute(value=ast.Name(id=module), attr=word):
                value = getattr(self._globals.get(module), word, None)
            case _:
                value = None
        function = getattr(value, "fn", None)
        return function if inspect.isfunction(function) and not function.__module__.startswith("triton.") else None


def _match_arguments(call: ast.Call, called: Callable[..., Any], names: frozenset[str]) -> list[ast.expr]:
    """The arguments of a call for some parameters."""
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return [*call.args, *(each.value for each in call.keywords)] if names else []
    given = dict(zip(inspect.signature(called).parameters, call.args, strict=False))
    given |= {each.arg: each.value for each in call.keywords if each.arg is not None}
    return [given[name] for name in names if name in given]


def _word(function: ast.expr) -> str:
    match function:
        case ast.Name(id=word) | ast.Attribute(attr=word):
            return word
        case _:
            return ""


def _assignments(function: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Each assigned name with its value."""
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from _pairs(target, value)
            case ast.AugAssign(target=target, value=value) | ast.For(target=target, iter=value):
                yield from _pairs(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from _pairs(target, value)
            case _:
                pass


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, part in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, part)
        return
    for name in ast.walk(target):
        if isinstance(name, ast.Name):
            yield name.id, value
