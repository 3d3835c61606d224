"""Limits of llguidance."""

from __future__ import annotations

from typing import Any


def parser_limits() -> Any:
    """Bounds on what one grammar may take: a mask takes at most some 20 ms, a compilation some 100 ms."""
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
