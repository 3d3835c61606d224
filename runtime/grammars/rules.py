"""Rules: a context-free grammar under construction, written out as llguidance's Lark."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import RequestError

MAX_RULES = 20_000  # alternatives; llguidance takes too long to read more


@dataclass(frozen=True)
class Repeat:
    """Its symbols repeated `least` to `most` times; most None: no upper bound."""

    symbols: tuple[Symbol, ...]
    least: int
    most: int | None


@dataclass(frozen=True)
class Verbatim:
    """A text of Lark that is not built from rules; it must derive some text."""

    text: str


Symbol = str | Repeat | Verbatim  # a name or a literal in quotation marks; terminals are in capitals
Alternative = tuple[Symbol, ...]


def literal(text: str) -> str:
    """A literal terminal for a text."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class Rules:
    """Rules by name, each a list of alternatives; terminals by expression, each defined once. `number`: distinguishes
    several of these in one grammar."""

    def __init__(self, number: int = 0) -> None:
        self._number = number
        self._rules: dict[str, list[Alternative]] = {}
        self._terminals: dict[str, str] = {}
        self._verbatim: dict[str, tuple[str, list[str]]] = {}
        self._barren: set[str] = set()
        self.num_alternatives = 0

    def terminal(self, expression: str) -> str:
        """The name of the terminal for an expression, which is added if it is new."""
        return self._terminals.setdefault(expression, f"T{self._number}_{len(self._terminals)}")

    def rule(self, alternatives: Iterable[Alternative] = ()) -> str:
        """Add a rule; its name."""
        name = f"r{self._number}_{len(self._rules)}"
        self._rules[name] = []
        self.extend(name, alternatives)
        return name

    def extend(self, name: str, alternatives: Iterable[Alternative]) -> None:
        """Add alternatives to a rule. RequestError if all rules together have too many."""
        added = list(alternatives)
        self._rules[name] += added
        self.num_alternatives += len(added)
        if self.num_alternatives > MAX_RULES:
            raise RequestError("the schema is too large: too many cases", field="response_format")

    def verbatim(self, text: str, used: list[str], derives: bool) -> str:
        """Add a rule given as text, with `NAME` for its name; returns the name. used: the rules that it uses, all of
        which must derive some text. derives: whether it derives some text itself."""
        name = f"v{self._number}_{len(self._verbatim)}"
        self._verbatim[name] = (text.replace("NAME", name), used)
        if not derives:
            self._barren.add(name)
        return name

    def written(self, start: str, empty: frozenset[str]) -> str | None:
        """Rules and terminals in Lark, without those that derive no text; None if `start` derives none. `empty`: the
        terminals that match nothing."""
        empty = empty | self._barren
        live = self._productive(empty)
        if start not in live:
            return None
        reached, queue = {start}, [start]
        lines = []
        while queue:
            name = queue.pop()
            kept = [a for a in self._rules[name] if all(_productive(symbol, live, empty) for symbol in a)]
            names = [symbol for alternative in kept for symbol in _names(alternative)]
            for symbol in [*names, *(used for name in names for used in self._verbatim.get(name, ("", []))[1])]:
                if symbol in self._rules and symbol in live and symbol not in reached:
                    reached.add(symbol)
                    queue.append(symbol)
            texts = dict.fromkeys(" ".join(_text(symbol, live, empty) for symbol in a) or '""' for a in kept)
            lines.append(f"{name}: {' | '.join(text for text in texts if text != name)}")
        used = [f"{name}: {text}" for text, name in self._terminals.items() if name not in empty]
        return "\n".join([*lines, *(text for text, _ in self._verbatim.values()), *used])

    @property
    def terminals(self) -> dict[str, str]:
        """The names of terminals by expression."""
        return self._terminals

    def _productive(self, empty: frozenset[str]) -> set[str]:
        """The rules that derive some text: the least fixed point, found by counting the missing rules of each
        alternative."""
        waiting: dict[str, list[tuple[str, list[int]]]] = {}
        live: set[str] = set()
        ready: list[str] = []
        for name, alternatives in self._rules.items():
            for alternative in alternatives:
                needs = {symbol for symbol in _needs(alternative) if symbol in self._rules}
                if any(symbol in empty for symbol in _needs(alternative)):
                    continue
                if not needs:
                    ready.append(name)
                lacking = [len(needs)]
                for symbol in needs:
                    waiting.setdefault(symbol, []).append((name, lacking))
        while ready:
            name = ready.pop()
            if name in live:
                continue
            live.add(name)
            for other, lacking in waiting.get(name, ()):
                lacking[0] -= 1
                if not lacking[0]:
                    ready.append(other)
        return live


def _names(alternative: Alternative) -> Iterable[str]:
    for symbol in alternative:
        if isinstance(symbol, Repeat):
            yield from _names(symbol.symbols)
        elif isinstance(symbol, str):
            yield symbol


def _needs(alternative: Alternative) -> Iterable[str]:
    """The names that must derive some text for the alternative to derive one."""
    for symbol in alternative:
        if isinstance(symbol, Repeat):
            if symbol.least:
                yield from _needs(symbol.symbols)
        elif isinstance(symbol, str):
            yield symbol


def _productive(symbol: Symbol, live: set[str], empty: frozenset[str]) -> bool:
    if isinstance(symbol, Repeat):
        return not symbol.least or all(_productive(inner, live, empty) for inner in symbol.symbols)
    return isinstance(symbol, Verbatim) or not (symbol in empty or (symbol[0] == "r" and symbol not in live))


def _text(symbol: Symbol, live: set[str], empty: frozenset[str]) -> str:
    if isinstance(symbol, Verbatim):
        return symbol.text
    if isinstance(symbol, str):
        return symbol
    if symbol.most == 0 or not all(_productive(inner, live, empty) for inner in symbol.symbols):
        return '""'
    inner = " ".join(_text(part, live, empty) for part in symbol.symbols)
    if (symbol.least, symbol.most) == (0, None):
        return f"({inner})*"
    if (symbol.least, symbol.most) == (0, 1):
        return f"({inner})?"
    return f"({inner}){{{symbol.least},{'' if symbol.most is None else symbol.most}}}"
