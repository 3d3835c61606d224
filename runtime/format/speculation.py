"""What program.json says about speculation: the drafter that an engine was compiled for, and its trees."""

from __future__ import annotations

import msgspec

# A layer that guesses, of the engine itself: a section that is a step of its own, over tokens and the hidden states
# before them, which are the input DRAFT_HIDDEN [T, H]. It gives logits and, to go on from, HIDDEN [L, H].
DRAFT_LAYER, DRAFT_HIDDEN, HIDDEN = "draft_layer", "draft_hidden", "hidden"
TAP = "tap"  # the section that gives HIDDEN of a step; it is asked for token rows, and not for logit rows
MAX_GUESSES = 63  # of one request in one step: with its last token, a tree of as many as a mask has bits


class DraftTree(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The static tree for steps of up to `batch` requests, best guesses first; without guesses, drafting would lose.

    Guess i follows guess parents[i] (-1: the request's last token), lies depths[i] tokens behind the last one, and is
    entry gather[i] of the heads' choices, head * ranks + rank. mask[i] has bit j set where guess i sees guess j.
    chances: the share of steps in which a guess is accepted, on the calibration text. expected_tokens and speedup:
    per step, and against plain decoding at that batch size, as the compiler expects.
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
    """The drafter that is used unless the user says otherwise, and what it needs.

    heads, ranks: of Medusa heads, and how many tokens each names. acceptance[head][rank]: as measured on the
    calibration text. trees: by batch size, ascending. slope: what each further token adds to a step, in plain steps.
    block, mask_token: of a layer that guesses a block at once, how many tokens that has, the known one before the
    guesses among them, and what stands for the others.
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
        """The tree for a step of `batch` requests; None where the compiler expects that drafting loses."""
        found = next((tree for tree in self.trees if tree.batch >= batch), None)
        return found if found is not None and found.parents else None
