"""Limits of llguidance."""

from __future__ import annotations

from typing import Any


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
