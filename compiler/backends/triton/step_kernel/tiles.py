"""Turns the source of a launch into functions of a tile: the work of one program of its grid, given its number.

A rendered source becomes part of another one: its own names get a number, and functions that ask Triton for the
program's number (`tl.program_id`) get it as arguments. Arithmetic and its order do not change, so neither do results.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from ..spec import LaunchSpec

_PLACE = ("tile_x", "tile_y", "tile_z")
WEIGHTS, ASK = "w_ptr", "ask_weights"  # of a product: its weights, and the function that prefetches the first of them
_SHARED = ("INTERPRETED",)  # a name that all sources have, with one meaning


class NoTileForm(Exception):
    """A launch cannot be computed tile by tile; the message says why."""


@dataclass(frozen=True)
class TileForm:
    """One launch as functions. text: their source; entry: the function that computes a tile; places: whether it takes
    the tile's place, three numbers after its other arguments. ask: the function that prefetches the first weights of a
    tile, given the pointer to them and the tile's place; "" if there is none."""

    text: str
    entry: str
    places: bool
    ask: str = ""


def tile_form(spec: LaunchSpec, number: int, grid: Sequence[int]) -> TileForm:
    """The functions of a launch, with `number` appended to their names. grid: the launch's programs along each axis.

    NoTileForm if a name has two meanings, or if a program may return early other than at once.
    """
    module = ast.parse(spec.source)
    own = [node for node in module.body if _name(node) not in (None, *_SHARED)]
    names = {name: f"{name}_{number}" for node in own if (name := _name(node)) is not None}
    placed = _placed([node for node in own if isinstance(node, ast.FunctionDef)])
    text = []
    for node in own:
        if isinstance(node, ast.FunctionDef):
            _check_names(node, names)
            node.body = _without_return(node.body) if node.name == spec.entry else node.body
        made = _Tile(names, placed, grid, spec.num_stages).visit(node)
        text.append(ast.unparse(ast.fix_missing_locations(made)))
    joined = "\n\n\n".join(text) + "\n"
    return TileForm(joined, names[spec.entry], spec.entry in placed, names.get(ASK, ""))


def _name(node: ast.stmt) -> str | None:
    """The function or constant that a module's statement defines; None for imports and texts."""
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def _asks(node: ast.AST) -> str:
    """ "program_id" or "num_programs" if a node calls that function; else ""."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr if node.func.attr in ("program_id", "num_programs") else ""
    return ""


def _placed(functions: Sequence[ast.FunctionDef]) -> set[str]:
    """The functions that ask for the number of the program, or call one that does."""
    found: set[str] = set()
    while True:
        more = {
            function.name
            for function in functions
            for node in ast.walk(function)
            if _asks(node) == "program_id"
            or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in found)
        }
        if more == found:
            return found
        found = more


def _check_names(function: ast.FunctionDef, names: dict[str, str]) -> None:
    """Raise NoTileForm if a function has a local name that is also a name of the module."""
    bound = {arg.arg for arg in function.args.args}
    bound |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if both := bound & names.keys():
        raise NoTileForm(f"{function.name} and its module both name {min(both)}")
    if unknown := bound & set(_PLACE):
        raise NoTileForm(f"{function.name} has a {min(unknown)}")


def _without_return(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements without an early return: what follows `if ..: return` becomes its else branch."""
    for at, node in enumerate(body):
        match node:
            case ast.If(body=[ast.Return(value=None)], orelse=[]):
                rest = _without_return(body[at + 1 :])
                return [*body[:at], ast.If(node.test, [ast.Pass()], rest or [ast.Pass()])]
            case _ if any(isinstance(n, ast.Return) and n is not body[-1] for n in ast.walk(node)):
                raise NoTileForm(f"it returns in line {node.lineno}, within a statement")
    return body


class _Tile(ast.NodeTransformer):
    """Adds the number to names, and the place as arguments to functions that ask for it."""

    def __init__(self, names: dict[str, str], placed: set[str], grid: Sequence[int], stages: int) -> None:
        self._names, self._placed, self._grid, self._stages = names, placed, grid, stages

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        placed = node.name in self._placed
        node.name = self._names[node.name]
        self.generic_visit(node)
        if placed:
            at = len(node.args.args) - len(node.args.defaults)
            node.args.args[at:at] = [ast.arg(name) for name in _PLACE]
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Name(self._names.get(node.id, node.id), node.ctx), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        asked = _asks(node)
        if asked:
            [axis] = node.args
            assert isinstance(axis, ast.Constant) and isinstance(axis.value, int)
            return ast.Name(_PLACE[axis.value]) if asked == "program_id" else ast.Constant(self._grid[axis.value])
        if isinstance(node.func, ast.Name) and node.func.id in self._placed:
            self.generic_visit(node)
            node.keywords += [ast.keyword(name, ast.Name(name)) for name in _PLACE]
            return node
        self.generic_visit(node)
        if _is_range(node) and all(keyword.arg != "num_stages" for keyword in node.keywords):
            node.keywords.append(ast.keyword("num_stages", ast.Constant(self._stages)))
        return node


def _is_range(node: ast.Call) -> bool:
    """Whether a call is `tl.range`, which uses the kernel's number of stages by default."""
    return isinstance(node.func, ast.Attribute) and node.func.attr == "range"
