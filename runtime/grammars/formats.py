"""String formats as patterns. In JSON Schema formats are annotations; here an answer must follow the known ones, unless
they are negated, and unknown ones are ignored."""

from __future__ import annotations

from typing import Any

_DAYS = ("(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])", "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)")
_DAY = f"(?:{'|'.join(_DAYS)}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"[1-9][0-9]{{3}}-{_DAY}"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_ATEXT = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,64}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H16 = "[0-9a-fA-F]{1,4}"
_IPV6 = "(?:" + "|".join(
    [f"(?:{_H16}:){{7}}{_H16}", *(f"(?:{_H16}:){{{n}}}(?::{_H16}){{1,{7 - n}}}" for n in range(1, 7)),
     f":(?::{_H16}){{1,7}}", f"(?:{_H16}:){{1,7}}:", "::"]
) + ")"  # fmt: skip
_PCHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_UNIT = "[0-9]{1,4}"

PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": (
        f"P(?:{_UNIT}W|(?:{_UNIT}Y(?:{_UNIT}M(?:{_UNIT}D)?)?|{_UNIT}M(?:{_UNIT}D)?|{_UNIT}D)"
        f"(?:T(?:{_UNIT}H(?:{_UNIT}M(?:{_UNIT}S)?)?|{_UNIT}M(?:{_UNIT}S)?|{_UNIT}S))?"
        f"|T(?:{_UNIT}H(?:{_UNIT}M(?:{_UNIT}S)?)?|{_UNIT}M(?:{_UNIT}S)?|{_UNIT}S))"
    ),
    "email": rf"{_ATEXT}(?:\.{_ATEXT}){{0,3}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_HOST}(?::[0-9]{{1,5}})?(?:/{_PCHAR}*)*|{_PCHAR}(?:{_PCHAR}|/)*){_TAIL}",
    "uri-reference": rf"(?:[A-Za-z][A-Za-z0-9+.-]*:(?://{_HOST}(?::[0-9]{{1,5}})?)?)?(?:/{_PCHAR}+)*/?{_TAIL}",
    "json-pointer": "(?:/(?:[^/~]|~[01])*)*",
}

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    "items", "additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems", "propertyNames",
    "then", "else", "contains",
)  # fmt: skip


def asserted(schema: Any) -> Any:
    """The schema with patterns added for the known formats, except below `not` and `if`, where an annotation must not
    become an assertion. `$schema` of inner parts is dropped."""
    if not isinstance(schema, dict):
        return schema
    changed: dict[str, Any] = {}
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            changed[key] = {name: _part(part) for name, part in schema[key].items()}
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            changed[key] = [_part(part) for part in schema[key]]
    for key in _SINGLE:
        if isinstance(schema.get(key), dict):
            changed[key] = _part(schema[key])
    pattern = PATTERNS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if pattern is not None:
        changed["allOf"] = [*changed.get("allOf", schema.get("allOf", [])), {"pattern": f"^(?:{pattern})$"}]
    return {**schema, **changed}


def _part(schema: Any) -> Any:
    found = asserted(schema)
    if isinstance(found, dict) and "$id" not in found and "$schema" in found:
        return {key: part for key, part in found.items() if key != "$schema"}
    return found
