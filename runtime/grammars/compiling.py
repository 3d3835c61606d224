"""From a source to a grammar of llguidance."""

from __future__ import annotations

import json
from typing import Any

from ..errors import RequestError
from .gbnf import as_lark


def lowered(source: str) -> str:
    """The grammar, in llguidance's own format. RequestError if it is none, or one beyond the limits."""
    import llguidance

    wanted = json.loads(source)
    if "grammars" in wanted:  # it is one already
        return source
    if "regex" in wanted:
        grammar = llguidance.LLMatcher.grammar_from_regex(wanted["regex"])
    else:
        rules = [
            as_lark(wanted["lark"]),
            *(f"{name}: %json {_compact(schema)}" for name, schema in wanted["schemas"].items()),
        ]
        grammar = json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}]})
    if error := llguidance.LLMatcher.validate_grammar(grammar, limits=parser_limits()):
        raise RequestError(f"the grammar was refused: {' '.join(error.split())[:300]}", field="response_format")
    return grammar


def parser_limits() -> Any:
    """Bounds on what one grammar may take: a mask takes at most a few ms, a compilation at most about 20 ms."""
    import llguidance

    return llguidance.LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=10_000,
        max_grammar_size=50_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def _compact(schema: Any) -> str:
    """Without blanks there is one way to write a value: it is shorter, and it cannot end in endless blanks."""
    plain = {"x-guidance": {"whitespace_flexible": False}}
    return json.dumps({**schema, **plain} if isinstance(schema, dict) else schema)
