"""Rewrites grammars in llama.cpp's notation (GBNF), which clients of other servers use, as Lark."""

from __future__ import annotations

from ..errors import RequestError


def as_lark(grammar: str) -> str:
    """The grammar as Lark; returned unchanged if it is not in llama.cpp's notation. RequestError if it cannot be
    rewritten."""
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # the library's parser may raise anything
        raise RequestError(f"the grammar was refused: {error}", field="response_format") from error
