"""Speculation in program.json: the drafter that an engine was compiled for, and its trees."""

from __future__ import annotations

import msgspec

# A draft layer in the engine itself: a section that is a step, over tokens and the hidden states before them, the input
# DRAFT_HIDDEN [T, H]. Its outputs are logits and HIDDEN [L, H], from which the next draft step continues.
DRAFT_LAYER, DRAFT_HIDDEN, HIDDEN = "draft_layer", "draft_hidden", "hidden"
TAP = "tap"  # the section whose output is HIDDEN of a step; it is asked for token rows, not for logit rows
MAX_GUESSES = 63  # of one request in one step: with its last token, as many tokens as a tree mask has bits


class DraftTree(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The static tree for steps of up to `batch` requests, best guesses first. It is empty if drafting would be slower.

    Guess i follows guess parents[i] (-1: the request's last token), is depths[i] tokens after the last token, and is
    entry gather[i] of the heads' choices, at index head * ranks + rank. mask[i] has bit j set if guess i sees guess j.
    chances: the share of steps in which a guess is accepted, on the calibration text. expected_tokens: per step, as the
    compiler predicts. speedup: predicted, against plain decoding at this batch size.
    """

    batch: int
    parents: list[int]
    depths: list[int]
    gather: list[int]
    mask: list[int]
    chances: list[float]
    expected_tokens: float
    speedup: float


class Speculation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The drafter that is used by default, and its parameters.

    heads, ranks: the number of Medusa heads, and how many tokens each proposes. acceptance[head][rank]: as measured on
    the calibration text. trees: by batch size, ascending. slope: how much each further token lengthens a step, in units
    of a plain step. block, mask_token: for a layer that guesses a block at once, the tokens of a block, the known one
    before the guesses included, and the token that stands for the unknown ones.
    """

    drafter: str
    heads: int = 0
    ranks: int = 0
    acceptance: list[list[float]] = []
    trees: list[DraftTree] = []
    slope: float = 0.04
    block: int = 0
    mask_token: int = 0

    def tree(self, batch: int) -> DraftTree | None:
        """The tree for a step of `batch` requests; None if the compiler expects that drafting is slower, or if no tree
        is for so many requests."""
        found = next((tree for tree in self.trees if tree.batch >= batch), None)
        return found if found is not None and found.parents else None
