"""Grammar rules for objects: the named properties in the order of the schema, then all others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from . import patterns
from .characters import encoded
from .documents import satisfiable, validator
from .languages import finite, is_empty
from .rules import Alternative, Symbol, literal

if TYPE_CHECKING:
    from jsonschema_rs import CanonicalSchema
    from jsonschema_rs.canonical import ObjectView

    from .values import ValueRules

_MOST_NAMES = 16  # the most names of a pattern that are listed as named properties
_MOST_OVERLAPS = 3  # the most patterns of which all combinations are considered
_MOST_CASES = 256
_MOST_STATES = 6000


@dataclass(frozen=True)
class Named:
    """A property with a known name. `schema` None: any value."""

    name: str
    required: bool
    schema: CanonicalSchema | None


@dataclass(frozen=True)
class Unnamed:
    """Properties whose names match an expression. `inside`: the object's patterns that these names match."""

    names: str
    inside: frozenset[str]
    schema: CanonicalSchema | None


@dataclass(frozen=True)
class Members:
    """One case of an object: each of `extra` occurs exactly once, the `unnamed` any number of times."""

    named: tuple[Named, ...]
    extra: tuple[Unnamed, ...]
    unnamed: tuple[Unnamed, ...]


def object_rules(values: ValueRules, view: ObjectView | None) -> list[Alternative]:
    """The alternatives for a value that is an object; view None: any object. RequestError if there are too many."""
    if view is None:
        anything = Members((), (), (Unnamed(patterns.ANY, frozenset(), None),))
        return _written(values, anything, 0, None)
    members = _KeywordReader(values, view).members()
    if members is None:
        return []
    cases = [members]
    for violation in view.violations:
        cases = [case for before in cases for case in _violating(values, before, violation)]
        if len(cases) > _MOST_CASES:
            raise RequestError("the schema is too large: too many cases", field="response_format")
    return [
        alternative
        for case in cases
        for alternative in _written(values, case, view.min_properties or 0, view.max_properties)
    ]


class _KeywordReader:
    """Combines an object's keywords into one schema per property."""

    def __init__(self, values: ValueRules, view: ObjectView) -> None:
        self._values, self._view = values, view
        self._names = view.property_names
        self._matchers = {pattern: validator({"pattern": pattern}).is_valid for pattern in view.pattern_properties}

    def members(self) -> Members | None:
        """The properties of the object; None if no object is valid."""
        declared, required = self._view.properties, set(self._view.required)
        listed = self._listed()
        names = self._values.document.ordered([*declared, *self._view.required, *(listed or ())])
        known = {*declared, *required, *(listed or ())}
        named: list[Named] = []
        for name in names:
            schema = self._schema_of(name)
            allowed = (self._names is None or self._values.takes(self._names, name)) and _possible(schema)
            if not allowed and name in required:
                return None
            if allowed:
                named.append(Named(name, name in required, schema))
        taken = [*known, *names]
        unnamed = [] if listed is not None else self._unnamed(taken)
        few = [(part, self._few(part)) for part in unnamed]
        named += [Named(name, False, part.schema) for part, some in few for name in some or ()]
        return Members(tuple(named), (), tuple(part for part, some in few if some is None))

    def _listed(self) -> list[str] | None:
        """The allowed names, if `propertyNames` lists them; else None."""
        view: Any = None if self._names is None else self._names.view()
        kind = type(view).__name__
        if kind == "ConstView":
            return [view.value] if isinstance(view.value, str) else []
        return [name for name in view.values if isinstance(name, str)] if kind == "EnumView" else None

    def _schema_of(self, name: str) -> CanonicalSchema | None:
        given = [self._view.properties[name]] if name in self._view.properties else []
        given += [
            self._view.pattern_properties[pattern] for pattern, matches in self._matchers.items() if matches(name)
        ]
        return self._values.both(given) if given else self._view.additional_properties

    def _unnamed(self, taken: list[str]) -> list[Unnamed]:
        base = patterns.ANY if self._names is None else self._values.strings(self._names)
        if base is None:
            return []
        if taken:
            base = f"({base}) & ~({' | '.join(literal(encoded(name)) for name in dict.fromkeys(taken))})"
        every = list(self._matchers)
        most = len(every) if len(every) <= _MOST_OVERLAPS else 1
        found = []
        for size in range(most + 1):
            for inside in combinations(every, size):
                schema = self._values.both(self._view.pattern_properties[p] for p in inside)
                schema = schema if inside else self._view.additional_properties
                if not _possible(schema):
                    continue
                parts = [f"({base})", *(f"({patterns.compiled(pattern)})" for pattern in inside)]
                parts += [f"~({patterns.compiled(pattern, loose=True)})" for pattern in every if pattern not in inside]
                names = " & ".join([*parts, patterns.ANY] if len(parts) > 1 or taken else parts)
                if len(parts) == 1 or not is_empty(names):
                    found.append(Unnamed(names, frozenset(inside), schema))
        return found

    def _few(self, part: Unnamed) -> list[str] | None:
        if not part.inside and self._names is None:  # too many to list
            return None
        some = finite(part.names, _MOST_NAMES)
        return None if some is None or any("\\" in name for name in some) else some


def _possible(schema: CanonicalSchema | None) -> bool:
    return schema is None or satisfiable(schema)


# -- violations that some property must have -------------------------------------------------------------------------


def _violating(values: ValueRules, members: Members, violation: Any) -> list[Members]:
    """The cases in which some property has the violation."""
    found = []
    for at, one in enumerate(members.named):
        schema = _by_name(values, one, violation)
        if schema is not False:
            changed = replace(one, required=True, schema=schema)
            found.append(replace(members, named=(*members.named[:at], changed, *members.named[at + 1 :])))
    for at, one in enumerate(members.extra):
        part = _by_expression(values, one, violation)
        if part is not None:
            found.append(replace(members, extra=(*members.extra[:at], part, *members.extra[at + 1 :])))
    for one in members.unnamed:
        part = _by_expression(values, one, violation)
        if part is not None:
            found.append(replace(members, extra=(*members.extra, part)))
    return found


def _by_name(values: ValueRules, one: Named, violation: Any) -> CanonicalSchema | bool | None:
    """The property's schema if it has the violation (None: any value); False if it cannot have it."""
    kind = type(violation).__name__
    if kind == "NameFailsView":
        return False if values.takes(violation.schema, one.name) else one.schema
    if kind == "PatternValueFailsView":
        if not validator({"pattern": violation.pattern}).is_valid(one.name):
            return False
        schema = values.both([one.schema, violation.schema.negate()])
    else:
        declared = one.name in violation.names
        if declared or any(validator({"pattern": p}).is_valid(one.name) for p in violation.patterns):
            return False
        schema = values.both([one.schema, violation.additional.negate()])
    return schema if _possible(schema) else False


def _by_expression(values: ValueRules, one: Unnamed, violation: Any) -> Unnamed | None:
    kind = type(violation).__name__
    parts, schema = [f"({one.names})"], one.schema
    if kind == "NameFailsView":
        inside = values.strings(violation.schema)
        parts += [] if inside is None else [f"~({inside})"]
    elif kind == "PatternValueFailsView":
        parts.append(f"({patterns.compiled(violation.pattern)})")
        schema = values.both([schema, violation.schema.negate()])
    else:
        names = [literal(encoded(name)) for name in violation.names]
        parts += [f"~({' | '.join(names)})"] if names else []
        parts += [f"~({patterns.compiled(pattern, loose=True)})" for pattern in violation.patterns]
        schema = values.both([schema, violation.additional.negate()])
    names = " & ".join([*parts, patterns.ANY])
    return None if not _possible(schema) or is_empty(names) else Unnamed(names, one.inside, schema)


# -- rules -----------------------------------------------------------------------------------------------------------


def _written(values: ValueRules, members: Members, least: int, most: int | None) -> list[Alternative]:
    """The alternatives for the properties. States count the properties so far, up to what commas and the bounds
    require."""
    rules = values.rules
    needed = sum(one.required for one in members.named) + len(members.extra)
    if not members.unnamed and most is not None and most >= len(members.named) + len(members.extra):
        most = None
    least = 0 if least <= needed else least
    cap = most if most is not None else max(least, 1)
    if (cap + 1) * (len(members.named) + 2) > _MOST_STATES:
        raise RequestError("the schema is too large: too many properties to count", field="response_format")
    states: dict[int, list[Alternative]] = {0: [()]}

    def follow(steps: list[tuple[Symbol, ...]], optional: bool) -> None:
        after: dict[int, list[Alternative]] = {}
        for count, arrivals in states.items():
            before = arrivals[0] if len(arrivals) == 1 and len(arrivals[0]) <= 1 else (rules.rule(arrivals),)
            if optional:
                after.setdefault(count, []).append(before)
            if count < cap or most is None:
                comma = ('","',) if count else ()
                after.setdefault(min(count + 1, cap), []).extend((*before, *comma, *step) for step in steps)
        states.clear()
        states.update(after)

    for one in members.named:
        follow([(_key(one.name), values.value(one.schema))], not one.required)
    for one in members.extra:
        follow([_step(values, one)], False)
    if members.unnamed:
        _repeat(values, states, [_step(values, one) for one in members.unnamed], cap, most)
    return [('"{"', rules.rule(arrivals), '"}"') for count, arrivals in states.items() if count >= least]


def _repeat(
    values: ValueRules,
    states: dict[int, list[Alternative]],
    steps: list[tuple[Symbol, ...]],
    cap: int,
    most: int | None,
) -> None:
    """Extend each state by any number of the steps that the bounds allow."""
    before: str | None = None
    for count in range(min(states), cap + 1):
        arrivals = list(states.get(count, []))
        comma = ('","',) if count > 1 else ()
        if before is not None:
            arrivals += [(before, *comma, *step) for step in steps]
        name = values.rules.rule(arrivals)
        if count == cap and most is None:
            values.rules.extend(name, [(name, '","', *step) for step in steps])
        states[count] = [(name,)]
        before = name


def _step(values: ValueRules, one: Unnamed) -> tuple[Symbol, ...]:
    return (values.rules.terminal(f'"\\"" ({one.names}) "\\":"'), values.value(one.schema))


def _key(name: str) -> str:
    return literal(f'"{encoded(name)}":')
