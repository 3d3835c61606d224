"""Limits of llguidance."""

from __future__ import annotations

from typing import Any


def parser_limits() -> Any:
    """Limits on the work for one grammar: about 20 ms for a mask, about 100 ms for a compilation."""
    import llguidance

    return llguidance.LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=30_000,
        max_grammar_size=200_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
