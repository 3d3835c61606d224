"""Translates patterns of JSON Schema to expressions over the characters of a JSON string.

Expressions are terminals of llguidance's Lark: `/Rust regex/`, joined by blanks, `|`, `&` and `~`. See `ecma` for
strict and loose.
"""

from __future__ import annotations

from ..errors import RequestError
from .characters import CHARACTER, Characters
from .ecma import Edge, Look, Node, Parser, PatternChoice, PatternRepeat, Sequence, refused

ANY = f"/{CHARACTER}*/"  # any string
_MAX_EXPRESSION = 200_000  # characters


def between(least: int | None, most: int | None) -> str:
    """An expression for strings of `least` to `most` characters; None: no bound."""
    if not least and most is None:
        return ANY
    return f"/{CHARACTER}{{{least or 0},{'' if most is None else most}}}/"


def compiled(pattern: str, loose: bool = False) -> str:
    """An expression for the strings in which a pattern is found. RequestError if it is no pattern, or if no automaton
    can express it."""
    expression = _found(Parser(pattern, loose).parse(), loose)
    if len(expression) > _MAX_EXPRESSION:
        raise refused(pattern, "it is too large")
    return expression


def _found(choice: PatternChoice, loose: bool) -> str:
    """An expression for the strings in which one branch matches somewhere."""
    return _any_of([_from_start(list(branch.parts), loose) for branch in choice.branches])


def _from_start(parts: list[Node], loose: bool) -> str:
    if parts and isinstance(parts[0], Edge) and not parts[0].end:
        return _to_end(parts[1:], loose, at_start=True)
    if parts and (opened := _opened(parts[0])) is not None:
        return _any_of([_from_start([*branch, *parts[1:]], loose) for branch in opened])
    return f"{ANY} {_to_end(parts, loose)}"


def _to_end(parts: list[Node], loose: bool, at_start: bool = False) -> str:
    """An expression for strings that begin with a match of the parts. at_start: whether that is the beginning of the
    whole string."""
    plain = ""
    for at, part in enumerate(parts):
        rest, here = parts[at + 1 :], at_start and not plain
        if isinstance(part, Edge):
            if not part.end and here:
                continue
            if not part.end:
                raise RequestError("a pattern has ^ after its beginning", field="response_format")
            if any(not isinstance(other, Edge) for other in rest):
                raise RequestError("a pattern has $ before its end", field="response_format")
            return _slashed(plain + ("(?:\\\\n)?" if loose else ""))
        if isinstance(part, Look):
            branches = [list(branch.parts) for branch in part.branches.branches]
            ahead = _any_of([_to_end(branch, loose != part.negated, here) for branch in branches])
            if part.negated:
                ahead = f"~{ahead}"
            return f"({_slashed(plain)} ({ahead} & {_to_end(rest, loose, here)} & {ANY}))"
        if (opened := _opened(part)) is not None:
            ways = _any_of([_to_end([*branch, *rest], loose, here) for branch in opened])
            return f"({_slashed(plain)} {ways})"
        plain += _regex(part)
    return _slashed(f"{plain}{CHARACTER}*")


def _opened(part: Node) -> list[tuple[Node, ...]] | None:
    """The alternatives of a group that contains edges or lookaheads; None if it contains none."""
    if isinstance(part, Characters | Edge | Look) or not _has_edges(part):
        return None
    if isinstance(part, Sequence):
        return [part.parts]
    if isinstance(part, PatternChoice):
        return [branch.parts for branch in part.branches]
    if part.most == 1:
        return [(part.part,)] if part.least else [(), (part.part,)]
    raise RequestError("a pattern repeats a group with ^, $ or a lookahead inside", field="response_format")


def _has_edges(part: Node) -> bool:
    if isinstance(part, Edge | Look):
        return True
    if isinstance(part, Sequence):
        return any(map(_has_edges, part.parts))
    if isinstance(part, PatternChoice):
        return any(map(_has_edges, part.branches))
    return isinstance(part, PatternRepeat) and _has_edges(part.part)


def _regex(part: Node) -> str:
    if isinstance(part, Characters):
        return part.regex()
    if isinstance(part, Sequence):
        return "".join(map(_regex, part.parts))
    if isinstance(part, PatternChoice):
        return f"(?:{'|'.join(map(_regex, part.branches))})"
    assert isinstance(part, PatternRepeat)
    bounds = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get(
        (part.least, part.most), f"{{{part.least},{'' if part.most is None else part.most}}}"
    )
    return f"(?:{_regex(part.part)}){bounds}"


def _any_of(expressions: list[str]) -> str:
    return f"({' | '.join(expressions)})"


def _slashed(regex: str) -> str:
    return '""' if not regex else "/" + regex.replace("/", "\\/") + "/"
