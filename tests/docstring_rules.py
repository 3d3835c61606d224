"""Rules for the facts in a docstring besides what the function does: shapes, errors, units, and the None case.

A rule asks for one word, not for a section: a function with an array states a shape (`[rows, width]`, or in words); one
that raises an error names it, or says what it raises or refuses; a quantity has its unit in its name or in the words;
a result that may be None says when it is, and an argument what None means. "As `step`" and "see Device" count: the
named docstring tells it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

SHAPE, ERROR, UNIT, NONE, ARGUMENT = (
    "the docstring states no shape",
    "the docstring does not tell of the error it raises:",
    "neither name nor docstring tells the unit of",
    "the docstring does not say when the result is None",
    "the docstring does not say what None means for",
)
AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef
Classes = dict[str, list[ast.ClassDef]]

ARRAYS = {"ndarray", "NDArray", "Tensor"}
HOLDERS = {"Iterable", "Iterator", "Sequence", "list", "tuple"}  # arrays of a dict differ; names say which
SHAPES = re.compile(r"\[[^\]]+\]|\b(shapes?|shaped|scalars?|dimensions?|dimensional|flat|vectors?)\b")
ELSEWHERE = re.compile(r"\b([Aa]s|[Ss]ee) [`A-Z]")

RAISED = {"IccError", "KeyError", "TypeError", "ValueError"}  # and classes that derive from them
RAISES = re.compile(r"\b([Rr]ais(es?|ed)|[Rr]efus(es?|ed|al))\b")

NOTHING = re.compile(r"\bNone\b")
NOT_GIVEN = re.compile(r"\bNone\b|\b(is|are|if|not|where) given\b|\b[Dd]efault|\b[Uu]nless\b")

TIME = "age deadline delay duration elapsed interval latency now period started timeout ttl".split()
MEMORY = {"bandwidth", "memory"}
SPEED = {"rate", "speed"}
COUNT = {"budget", "capacity", "limit", "size"}
OF_TIME = r"s|monotonic|ms|us|ns|seconds?|milliseconds?|microseconds?|nanoseconds?|minutes?|hours?|days?"
OF_MEMORY = r"bytes?|[kmgtKMGT]i?[bB]|bits?"
OF_COUNT = (
    r"blocks?|characters?|codes?|elements?|entries|experts?|lines?|nodes?|numbers?|positions?|ranks?|requests?|rows?|"
    r"sequences?|states?|steps?|tokens?|values?|weights?|words?|files?"
)
UNITS = {
    **dict.fromkeys(TIME, OF_TIME),
    **dict.fromkeys(MEMORY, OF_MEMORY),
    **dict.fromkeys(SPEED, r"\w+/s|per|share|fraction|ratio|probability"),
    **dict.fromkeys(COUNT, f"{OF_TIME}|{OF_MEMORY}|{OF_COUNT}"),
}


def of_function(item: AnyFunction, text: str, above: str, classes: Classes) -> Iterator[str]:
    """The facts that the docstring of a function lacks. text: the docstring, and that of the method it overrides, if
    any. above: the docstring of its class."""
    arguments = [*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs]
    annotations = [item.returns, *(argument.annotation for argument in arguments)]
    elsewhere = ELSEWHERE.search(text) is not None
    command = "command" in map(name_of, item.decorator_list)  # a command: the docstring is its help text
    if any(map(_is_array, annotations)) and not (elsewhere or SHAPES.search(text)):
        yield SHAPE
    if not (elsewhere or RAISES.search(text) or command):
        for name in sorted(set(_raised(item.body, frozenset(), classes))):
            known = ancestry(name, classes)
            if known & RAISED and not re.search(rf"\b({'|'.join(known)})s?\b", text + above):
                yield f"{ERROR} {name}"
    for argument in arguments:
        if not command and _lacks_unit(argument.arg, argument.annotation, text + above):
            yield f"{UNIT} {argument.arg}"
        if _may_be_none(argument.annotation) and not (elsewhere or command or NOT_GIVEN.search(text + above)):
            yield f"{ARGUMENT} {argument.arg}"
    if _may_be_none(item.returns) and not (elsewhere or NOTHING.search(text + above)):
        yield NONE


def of_fields(item: ast.ClassDef, text: str, lines: Sequence[str]) -> Iterator[str]:
    """The facts about fields that neither the class's docstring nor a comment or text at the field tells. lines: the
    file's."""
    for field in item.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        name = field.target.id
        if name.startswith("_"):
            continue
        told = f"{text} {_at(field, lines)}"
        if _is_array(field.annotation) and not SHAPES.search(told):
            yield f"{SHAPE} of {name}"
        if _lacks_unit(name, field.annotation, told):
            yield f"{UNIT} {name}"


def _at(field: ast.AnnAssign, lines: Sequence[str]) -> str:
    """The comments and strings in the lines of a field."""
    within = lines[field.lineno - 1 : field.end_lineno]
    comments = [line.partition("  #")[2] for line in within]
    texts = [node.value for node in ast.walk(field) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return " ".join(comments + texts)


def _is_array(annotation: ast.expr | None) -> bool:
    match annotation:
        case ast.Constant(value=str(text)):
            return _is_array(ast.parse(text, mode="eval").body)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in ARRAYS
        case ast.BinOp(left=left, right=right):
            return _is_array(left) or _is_array(right)
        case ast.Tuple(elts=parts):
            return any(map(_is_array, parts))
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
            return name in ARRAYS or (name in HOLDERS and _is_array(inner))
    return False


def _may_be_none(annotation: ast.expr | None) -> bool:
    match annotation:
        case ast.Constant(value=str(text)):
            return _may_be_none(ast.parse(text, mode="eval").body)
        case ast.BinOp(right=ast.Constant(value=None)):
            return True
    return False


def _raised(body: Iterable[ast.AST], caught: frozenset[str], classes: Classes) -> Iterator[str]:
    """The names of the classes that statements raise and do not catch, nested functions left out."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                pass
            case ast.Raise(exc=ast.Call(func=raised)) | ast.Raise(exc=ast.expr() as raised):
                name = name_of(raised)
                if not caught & {*ancestry(name, classes), "BaseException", "Exception", ""}:
                    yield name
            case ast.Try():
                yield from _raised(node.body, caught.union(*map(_catches, node.handlers)), classes)
                yield from _raised([*node.handlers, *node.orelse, *node.finalbody], caught, classes)
            case _:
                yield from _raised(ast.iter_child_nodes(node), caught, classes)


def _catches(handler: ast.ExceptHandler) -> set[str]:
    """The names of the exceptions that a handler catches and does not raise again; "" for all."""
    if any(isinstance(node, ast.Raise) and node.exc is None for node in ast.walk(handler)):
        return set()
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {"" if kind is None else name_of(kind) for kind in kinds}


def ancestry(name: str, classes: Classes) -> set[str]:
    """A class and all those it derives from, by their names."""
    known, waiting = set[str](), [name]
    while waiting:
        name = waiting.pop()
        if name not in known:
            known.add(name)
            waiting += [name_of(base) for found in classes.get(name, ()) for base in found.bases]
    return known


def name_of(node: ast.expr) -> str:
    """The last name of `module.Name`, `Name[T]` or `Name()`; "" for other expressions."""
    match node:
        case ast.Subscript(value=inner) | ast.Call(func=inner):
            return name_of(inner)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _lacks_unit(name: str, annotation: ast.expr | None, told: str) -> bool:
    if annotation is None or ast.unparse(annotation).split(" | ")[0] not in ("float", "int"):
        return False
    words = name.split("_")
    units = next((UNITS[word] for word in reversed(words) if word in UNITS), None)
    if units is None or any(re.fullmatch(units, word) for word in words):
        return False
    return not re.search(rf"\b({units})\b", told)
