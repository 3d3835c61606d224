"""Selects the cases that schemathesis tries, and generates texts of the formats in the OpenAPI document."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import schemathesis
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2]))  # for the module sizes
from sizes import SOAK, size_of

words = st.text("abcxyz 0189", min_size=1, max_size=8)
atoms = words | st.sampled_from(["[a-z]", "\\d", "(?i:a)", "[^,]", "\\p{Lu}", "."])
pieces = st.builds("{}{}".format, atoms.map("({})".format), st.sampled_from(["", "?", "*", "+", "{1,3}"]))
regexes = st.lists(pieces | pieces.map("({}|b)".format), min_size=1, max_size=4).map("".join)
alternatives = st.lists(words.map('"{}"'.format) | regexes.map("/{}/".format), min_size=1, max_size=3).map(" | ".join)
grammars = st.builds("start: a b?\na: {}\nb: {}\n".format, alternatives, alternatives)
if not SOAK:  # generating them takes more time than all requests
    regexes = st.sampled_from(["(a)?(b c)*", "([a-z]){1,3}", "(\\d)+(x|b)", "((?i:a)|b)", "([^,])(\\p{Lu})*(.)?"])
    bodies = ['a: "x y"\nb: /([a-z])+/', 'a: "x" | /([^,])*/\nb: "0" | "z" | /(\\d)?/']
    grammars = st.sampled_from([f"start: a b?\n{rules}\n" for rules in bodies])

schemathesis.openapi.format("json-object", st.sampled_from(["{}", '{"type": "integer"}', '{"const": "a"}']))
schemathesis.openapi.format("rust-regex", regexes)
schemathesis.openapi.format("lark", grammars)


@schemathesis.hook
def before_load_schema(context, raw_schema) -> None:
    """Remove the maxLength of texts with a format: generated ones are never that long, and schemathesis would search
    for one in vain, half a second each."""
    if not SOAK:
        _without_longest(raw_schema)


def _without_longest(schema) -> None:
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    if isinstance(schema, dict) and schema.get("format") in ("json-object", "rust-regex", "lark"):
        schema.pop("maxLength", None)
    for part in parts:
        _without_longest(part)


@schemathesis.hook
def filter_case(context, case) -> bool:
    """Keep one in `schemathesis_cases_every` of the cases in the coverage phase (each wrong type of each field, each
    bound), and all others."""
    if case.meta is None or case.meta.phase.name.value != "coverage":
        return True
    named = repr((case.operation.label, case.meta.phase.data.description, case.body))
    return zlib.crc32(named.encode("utf-8", "replace")) % size_of("schemathesis_cases_every") == 0


@schemathesis.hook
def after_call(context, case, response) -> None:
    """JSON Schema cannot express that two fields contradict each other, that nothing satisfies a schema, that names are
    numbers below a bound, or how many blocks of all turns have a mark: refusals of such requests are turned into 404,
    which is documented. The same goes for a 504, as the server's deadline is short."""
    told = (b"conflicting_fields", b"no value satisfies the schema", b"marks, at most 4", b"is not in the vocabulary")
    if response.status_code == 400 and any(words in response.content for words in told):
        response.status_code = 404
    if response.status_code == 504 and b"the deadline has passed" in response.content:
        response.status_code = 404
