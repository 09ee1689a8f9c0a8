"""Megatron-LM's arguments from a command line, a launch script or a YAML file.

All come out alike: names without dashes in front and with `-` inside, values as written, True for
a flag without a value.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from meshwright.base.errors import InputError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
}


def from_yaml(text: str, source: str) -> dict[str, Any]:
    """Arguments of a YAML file: under MODEL_ARGS as in Megatron's own tests, or at its top.

    Raises InputError if it is no mapping of names to values.
    """
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{source}: not valid YAML: {reason}") from error
    if isinstance(raw, dict) and isinstance(raw.get("MODEL_ARGS"), dict):
        raw = raw["MODEL_ARGS"]
    if not isinstance(raw, dict):
        raise InputError(f"{source}: must map argument names to values, as in --num-layers: 32")
    return {_name(str(key)): value for key, value in raw.items() if value is not False}


def from_text(text: str, source: str) -> dict[str, Any]:
    """Arguments in a command line or shell script; variables that the script sets are filled in.

    Raises InputError if there are none, or quotes do not match.
    """
    joined = _ARITHMETIC.sub(lambda match: match[0].replace(" ", ""), text.replace("\\\n", " "))
    try:
        words = shlex.split(joined, comments=True)
    except ValueError as error:
        raise InputError(f"{source}: not a command line or shell script: {error}") from error
    found = _arguments(words)
    if not found:
        raise InputError(f"{source}: no arguments in it; they look like --num-layers 32")
    return found


def _arguments(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    variables: dict[str, str] = {}
    name: str | None = None
    pending = list(reversed(words))
    while pending:
        word = pending.pop()
        assigned = _ASSIGNMENT.fullmatch(word)
        if assigned and not word.startswith("-"):
            value = _filled(assigned[2], variables)
            name = None
            if value.startswith("(") or "--" in value:  # an array or a string of arguments
                pending += reversed(value.removeprefix("(").split())
            else:
                variables[assigned[1]] = value
            continue
        ends = word.endswith(")") and "(" not in word
        word = _filled(word.removesuffix(")") if ends else word, variables)
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            name = _name(name)
            found[name] = value if equals else True
        elif name and word:
            found[name] = word if found[name] is True else f"{found[name]} {word}"
        name = None if ends or word.endswith(".py") else name
    return found


def _name(key: str) -> str:
    return key.lstrip("-").replace("_", "-")


def _filled(word: str, variables: Mapping[str, str]) -> str:
    """`word` with the variables that are known and with whole-number arithmetic done."""

    def known(match: re.Match[str]) -> str:
        default = match[3] if match[3] is not None else match[0]
        return variables.get(match[1] or match[2], default)

    word = _VARIABLE.sub(known, word)
    return _ARITHMETIC.sub(lambda match: _computed(match[1], variables) or match[0], word)


def _computed(text: str, variables: Mapping[str, str]) -> str | None:
    named = re.sub(r"[A-Za-z_]\w*", lambda m: variables.get(m[0], m[0]), text)
    try:
        return str(_value(ast.parse(named.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only whole numbers and + - * /")
