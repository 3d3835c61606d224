"""Grammar rules for arrays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from .documents import satisfiable
from .rules import Alternative, Repeat, Symbol

if TYPE_CHECKING:
    from jsonschema_rs import CanonicalSchema
    from jsonschema_rs.canonical import ArrayView

    from .values import ValueRules

_MOST_DISTINCT = 64  # values of which a rule can keep track: llguidance's parameters have 64 bits
_MOST_STATES = 4000


def array_rules(values: ValueRules, view: ArrayView | None) -> list[Alternative]:
    """The alternatives for a value that is an array; view None: any array."""
    if view is None:
        return _plain_array(values, [], None, 0, None)
    least, most = view.min_items or 0, view.max_items
    prefix, items = list(view.prefix_items), view.items
    if items is not None and not satisfiable(items):
        most = min(len(prefix), most if most is not None else len(prefix))
    distinctness = str(view.distinctness.value)
    if distinctness == "some_repeated":
        values.wider = True
    if distinctness == "all_distinct" and (most is None or most > 1):
        if not prefix and not view.contains and (few := _few(values, items)) is not None:
            return [(_chosen(values, few, least, most),)]
        values.distinct = True
    if view.contains:
        return _counted_array(values, view, prefix, items, (least, most))
    return _plain_array(values, prefix, items, least, most)


def _plain_array(
    values: ValueRules, prefix: list[CanonicalSchema], items: CanonicalSchema | None, least: int, most: int | None
) -> list[Alternative]:
    """An array without `contains`: rules for the rest after each prefix item, then the repeated items."""
    prefix = prefix if most is None else prefix[:most]
    each = values.value(items)
    more = None if most is None else most - len(prefix)
    if not prefix:
        if more == 0:
            return [('"["', '"]"')] if not least else []
        rest: Symbol = Repeat(('","', each), max(least - 1, 0), None if more is None else more - 1)
        filled: Alternative = ('"["', each, rest, '"]"')
        return [filled] if least else [('"["', '"]"'), filled]
    tail: list[Alternative] = [(Repeat(('","', each), max(least - len(prefix), 0), more),)] if more != 0 else [()]
    for at in range(len(prefix) - 1, -1, -1):
        item = values.value(prefix[at])
        after: Alternative = (('","',) if at else ()) + (item, values.rules.rule(tail))
        tail = [after] if at < least else [(), after]
    return [('"["', values.rules.rule(tail), '"]"')]


def _counted_array(
    values: ValueRules,
    view: ArrayView,
    prefix: list[CanonicalSchema],
    items: CanonicalSchema | None,
    bounds: tuple[int, int | None],
) -> list[Alternative]:
    """An array with `contains`: one state per position and per capped count of the items that satisfied each
    `contains`."""
    least, most = bounds
    wanted = [(c.schema, 1 if c.min_contains is None else c.min_contains, c.max_contains) for c in view.contains]
    last = max(len(prefix), least, 1) if most is None else most  # all later positions are equivalent
    caps = [low if high is None else high + 1 for _, low, high in wanted]
    start: tuple[int, ...] = (0,) * (1 + len(wanted))
    names: dict[tuple[int, ...], str] = {}
    queue: list[tuple[int, ...]] = [start]
    kinds = {at: list(_kinds(values, _item(prefix, items, at), wanted)) for at in range(len(prefix) + 1)}
    arrivals: dict[tuple[int, ...], list[Alternative]] = {start: []}
    while queue:
        state = queue.pop()
        if state in names:
            continue
        names[state] = values.rules.rule()
        if len(names) > _MOST_STATES:
            raise RequestError("the schema is too large: too many items to count", field="response_format")
        at, counts = state[0], state[1:]
        if most is not None and at >= most:
            continue
        for met, item in kinds[min(at, len(prefix))]:
            after = [min(count + one, cap) for count, one, cap in zip(counts, met, caps, strict=True)]
            if any(high is not None and count > high for count, (_, _, high) in zip(after, wanted, strict=True)):
                continue
            following = (min(at + 1, last), *after)
            before: Alternative = () if at == 0 else (names[state], '","')
            arrivals.setdefault(following, []).append((*before, item))
            queue.append(following)
    for state, alternatives in arrivals.items():
        values.rules.extend(names[state], alternatives)
    if start in names:
        values.rules.extend(names[start], [()])
    enough = [
        names[state] for state in names
        if state[0] >= least and all(count >= low for count, (_, low, _) in zip(state[1:], wanted, strict=True))
    ]  # fmt: skip
    return [('"["', name, '"]"') for name in enough]


def _item(prefix: list[CanonicalSchema], items: CanonicalSchema | None, at: int) -> CanonicalSchema | None:
    return prefix[at] if at < len(prefix) else items


def _kinds(
    values: ValueRules, item: CanonicalSchema | None, wanted: list[tuple[CanonicalSchema, int, int | None]]
) -> Iterator[tuple[tuple[int, ...], str]]:
    """The combinations of `contains` that an item can satisfy, each with its rule."""
    for met in product((0, 1), repeat=len(wanted)):
        node = item
        for one, (schema, _, most) in zip(met, wanted, strict=True):
            if one:
                node = values.both([node, schema])
            elif most is not None:  # without a maximum, an item may satisfy it without being counted
                node = values.both([node, schema.negate()])
        if node is None or satisfiable(node):
            yield met, values.value(node)


def _few(values: ValueRules, node: CanonicalSchema | None) -> list[Any] | None:
    """All values of a schema; None if there are many."""
    if node is None:
        return None
    found: dict[str, Any] = {}
    for case in values.cases(node):
        view: Any = case.view()
        kind = type(view).__name__
        if kind == "ConstView":
            some = [view.value]
        elif kind == "EnumView":
            some = view.values
        elif kind == "MultiTypeView" and set(view.types) <= {"null", "boolean"}:
            some = [value for name in view.types for value in ([None] if name == "null" else [False, True])]
        elif kind == "IntegerView" and None not in (view.minimum, view.maximum) and not view.not_multiple_of:
            if view.maximum - view.minimum >= _MOST_DISTINCT:
                return None
            some = [value for value in range(view.minimum, view.maximum + 1) if values.takes(case, value)]
        else:
            return None
        found.update((json.dumps(value, sort_keys=True, default=str), value) for value in some)
        if len(found) > _MOST_DISTINCT:
            return None
    return list(found.values())


def _chosen(values: ValueRules, few: list[Any], least: int, most: int | None) -> str:
    """A rule for each value at most once, in any order: a bit of the rule's parameter is set when a value has been
    used."""
    rules = values.rules
    each = [rules.rule([values.constant(value)]) for value in few]
    bound = "" if most is None else f"bit_count_lt(_, {most})"
    picks = [
        f"{name} NAMEm::set_bit({bit}) %if and(bit_clear({bit}), {bound})" if bound else
        f"{name} NAMEm::set_bit({bit}) %if bit_clear({bit})"
        for bit, name in enumerate(each)
    ]  # fmt: skip
    first = " | ".join([*([f'"" %if bit_count_ge(_, {least})'] if not least else []), *picks])
    more = " | ".join([f'"" %if bit_count_ge(_, {least})', *(f'"," {pick}' for pick in picks)])
    name = rules.verbatim(f'NAME: "[" NAMEf::0x0 "]"\nNAMEf::_ : {first}\nNAMEm::_ : {more}', each, least <= len(few))
    return name
