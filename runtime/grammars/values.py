"""Turns a schema in canonical form into grammar rules for each kind of value."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import reduce
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from . import patterns
from .arrays import array_rules
from .characters import encoded
from .documents import Document, satisfiable, validator
from .multiples import integer_rules, number_rules
from .numbers import integers, numbers
from .objects import object_rules
from .rules import Alternative, Rules, Symbol, literal

if TYPE_CHECKING:
    from jsonschema_rs import CanonicalSchema
    from jsonschema_rs.canonical import StringView

_MOST_CASES = 512  # cases of one schema
_MOST_SECONDS = 1.5  # seconds of CPU time for one document


class ValueRules:
    """Grammar rules for the values of one document, one rule per canonical schema."""

    def __init__(self, document: Document, rules: Rules) -> None:
        self.document, self.rules = document, rules
        self._names: dict[CanonicalSchema, str] = {}
        self._types: dict[str, str] = {}
        self._queue: list[tuple[str, CanonicalSchema]] = []
        self._validators: dict[CanonicalSchema, Callable[[Any], bool]] = {}
        self._started = time.thread_time()
        self.distinct = False  # whether some array must not repeat an item, which the rules cannot express
        self.wider = False  # whether the rules allow more than the schema

    def start(self) -> str:
        """The rule for a value of the document, with all rules that it needs."""
        name = self.value(self.document.root)
        while self._queue:
            rule, node = self._queue.pop()
            self._check_time()
            self.rules.extend(rule, self._alternatives(node))
        return name

    def value(self, node: CanonicalSchema | None) -> str:
        """The rule for a value of a schema (None: any value); its alternatives are added later."""
        if node is None:
            return self._type("any")
        name = self._names.get(node)
        if name is None:
            name = self._names[node] = self.rules.rule()
            self._queue.append((name, node))
        return name

    def both(self, nodes: Iterable[CanonicalSchema | None]) -> CanonicalSchema | None:
        """The intersection of schemas; None (of a schema, or the result): any value."""
        given = [node for node in nodes if node is not None]
        return reduce(lambda first, second: first.intersect(second), given) if given else None

    def takes(self, node: CanonicalSchema, value: Any) -> bool:
        """Whether a value is valid for a schema."""
        check = self._validators.get(node)
        if check is None:
            check = self._validators[node] = validator(node.to_json_schema()).is_valid
        return check(value)

    def _check_time(self) -> None:
        if time.thread_time() - self._started > _MOST_SECONDS:
            raise RequestError("the schema is too large: it takes too long to take apart", field="response_format")

    # -- cases -------------------------------------------------------------------------------------------------------

    def cases(self, node: CanonicalSchema, within: frozenset[str] = frozenset()) -> list[CanonicalSchema]:
        """Split a schema into schemas of one type each, of which a value must follow one. `within`: the references that
        led here. RequestError if there are too many, or if a part is not supported."""
        self._check_time()
        view: Any = node.view()
        kind = type(view).__name__
        found: list[CanonicalSchema]
        if kind == "ReferenceView":
            target = None if view.uri in within else node.definition(view.uri)
            found = [] if target is None else self.cases(target, within | {view.uri})
        elif kind == "AnyOfView":
            found = [case for branch in view.branches for case in self.cases(branch, within)]
        elif kind == "OneOfView":
            found = self._one_of(view.branches, within)
        elif kind == "NotView":
            found = self.cases(_union(self.cases(view.schema, within)).negate(), within)
        elif kind == "AllOfView":
            found = self._all_of(view.branches, within)
        elif kind == "FalseView":
            found = []
        elif kind == "RawView":
            raise RequestError(f"the schema is not supported: {_reason(view)}", field="response_format")
        else:
            found = [node]
        if len(found) > _MOST_CASES:
            raise RequestError("the schema is too large: too many cases", field="response_format")
        return found

    def _all_of(self, branches: list[CanonicalSchema], within: frozenset[str]) -> list[CanonicalSchema]:
        together = self.cases(branches[0], within)
        for branch in branches[1:]:
            met = [first.intersect(second) for first in together for second in self.cases(branch, within)]
            together = [case for both in met if satisfiable(both) for case in self._flat(both)]
            if len(together) > _MOST_CASES:
                raise RequestError("the schema is too large: too many cases", field="response_format")
        return together

    def _flat(self, node: CanonicalSchema) -> list[CanonicalSchema]:
        """The cases of an intersection of two cases, which has no references at its top."""
        view: Any = node.view()
        if type(view).__name__ == "AnyOfView":
            return [case for branch in view.branches for case in self._flat(branch)]
        return [node]

    def _one_of(self, branches: list[CanonicalSchema], within: frozenset[str]) -> list[CanonicalSchema]:
        """Each branch without the values that another branch takes."""
        each = [self.cases(branch, within) for branch in branches]
        found = []
        for at, cases in enumerate(each):
            others = [other for number, rest in enumerate(each) if number != at for other in rest]
            for case in cases:
                left = case
                for other in others:
                    if satisfiable(case.intersect(other)):
                        left = self._without(left, other)
                found += self._flat(left) if satisfiable(left) else []
        return found

    def _without(self, first: CanonicalSchema, second: CanonicalSchema) -> CanonicalSchema:
        """A schema for values that the first takes and the second does not; the first itself if that cannot be
        expressed."""
        try:
            return first.subtract(second)
        except ValueError:
            self.wider = True
            return first

    # -- alternatives ------------------------------------------------------------------------------------------------

    def _alternatives(self, node: CanonicalSchema) -> list[Alternative]:
        view: Any = node.view()
        kind = type(view).__name__
        kinds: dict[str, Callable[[], list[Alternative]]] = {
            "AnyOfView": lambda: [(self.value(branch),) for branch in view.branches],
            "TrueView": lambda: [(self._type("any"),)],
            "FalseView": lambda: [],
            "MultiTypeView": lambda: [(self._type(name),) for name in view.types],
            "TypedGroupView": lambda: [(self.value(view.body),)],
            "ConstView": lambda: [self.constant(view.value)],
            "EnumView": lambda: [self.constant(value) for value in view.values],
            "StringView": lambda: [(self.rules.terminal(f'"\\"" ({self._characters(view)}) "\\""'),)],
            "IntegerView": lambda: integer_rules(self, view),
            "NumberView": lambda: number_rules(self, view),
            "ArrayView": lambda: array_rules(self, view),
            "ObjectView": lambda: object_rules(self, view),
        }
        if kind == "ReferenceView":
            target = node.definition(view.uri)
            return [] if target is None else [(self.value(target),)]
        if kind in kinds:
            return kinds[kind]()
        return [(self.value(case),) for case in self.cases(node)]

    def _type(self, name: str) -> str:
        """The rule for all values of a type."""
        if name not in self._types:
            self._types[name] = self.rules.rule()
            self.rules.extend(self._types[name], self._of_type(name))
        return self._types[name]

    def _of_type(self, name: str) -> list[Alternative]:
        if name == "any":
            return [(self._type(each),) for each in ("null", "boolean", "number", "string", "array", "object")]
        if name == "null":
            return [('"null"',)]
        if name == "boolean":
            return [('"true"',), ('"false"',)]
        if name == "integer":
            return [(self.rules.terminal(integers()),)]
        if name == "number":
            return [(self.rules.terminal(numbers(None, None)),)]
        if name == "string":
            return [(self.rules.terminal(f'"\\"" {patterns.ANY} "\\""'),)]
        return array_rules(self, None) if name == "array" else object_rules(self, None)

    def constant(self, value: Any) -> Alternative:
        """The alternative for exactly one value."""
        if isinstance(value, dict):
            symbols: list[Symbol] = ['"{"']
            names = [name for name in self.document.ordered(value) if name in value]
            for number, name in enumerate(names):
                symbols += [*(['","'] if number else []), _key(name), *self.constant(value[name])]
            return (*symbols, '"}"')
        if isinstance(value, list):
            symbols = ['"["']
            for number, part in enumerate(value):
                symbols += [*(['","'] if number else []), *self.constant(part)]
            return (*symbols, '"]"')
        return (literal(scalar(value)),)

    # -- strings -----------------------------------------------------------------------------------------------------

    def strings(self, node: CanonicalSchema) -> str | None:
        """An expression over characters for the strings of a schema; None if there are none."""
        found = []
        for case in self.cases(node):
            view: Any = case.view()
            kind = type(view).__name__
            if kind == "TrueView" or (kind == "MultiTypeView" and "string" in view.types):
                return patterns.ANY
            if kind == "StringView":
                found.append(self._characters(view))
            elif kind == "TypedGroupView" and view.type_name == "string":
                found.append(self.strings(view.body))
            values = [view.value] if kind == "ConstView" else view.values if kind == "EnumView" else []
            found += [literal(encoded(value)) for value in values if isinstance(value, str)]
        return " | ".join(f"({expression})" for expression in found if expression) or None

    def _characters(self, view: StringView) -> str:
        parts = [f"({patterns.compiled(pattern)})" for pattern in view.patterns]
        if view.min_length or view.max_length is not None or not parts:
            parts.insert(0, patterns.between(view.min_length, view.max_length))
        parts += [f"~({patterns.compiled(pattern, loose=True)})" for pattern in view.excluded_patterns]
        if view.excluded:
            parts.append(f"~({' | '.join(literal(encoded(text)) for text in view.excluded)})")
        if len(parts) > 1 and not view.min_length and view.max_length is None:
            parts.append(patterns.ANY)  # a complement alone would also match texts that are no strings
        return " & ".join(parts)


def _key(name: str) -> str:
    """The terminal for a property's name."""
    return literal(f'"{encoded(name)}":')


def scalar(value: Any) -> str:
    """The text of a value in an answer."""
    if isinstance(value, str):
        return f'"{encoded(value)}"'
    return str(value) if isinstance(value, Decimal) else json.dumps(value)


def _union(nodes: list[CanonicalSchema]) -> CanonicalSchema:
    return reduce(lambda first, second: first.union(second), nodes)


def _reason(view: Any) -> str:
    where = f" at {view.pointer}" if view.pointer else ""
    return f"{str(view.reason.value).replace('_', ' ')}{where}"
