"""Verifies a tree of guesses with the model's tokens: lossless, greedy or sampled.

The model's token is sampled at every node, from the model's distribution and the request's own random stream, just as
in plain decoding; as long as a guess equals that token, its successor is already computed and the walk continues. Each
token is therefore drawn from the model's distribution given the tokens before it, whatever was guessed, and a seed
gives the same tokens as without speculation. This is rejection sampling over the tree (Leviathan et al. 2023; Miao et
al. 2024) for guesses that are fixed, not drawn: there, guess x is accepted with probability p(x), the next sibling with
p(x') / (1 - p(x)), and after the last sibling a token is drawn from the rest, which together is drawing from p.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..batch.scheduled import Draft
from ..requests.sampler import AcceptedTokens, SampledToken


def follow(
    draft: Draft | None, sample: Callable[[int], SampledToken | None], end_ids: Collection[int]
) -> AcceptedTokens:
    """Walk the tree; draft None: there are no guesses. sample: samples from a logit row: row 0 is for the last token,
    row 1 + i for guess i."""
    guesses = {} if draft is None else children(draft)
    samples: list[SampledToken | None] = []
    accepted: list[int] = []
    row = 0
    while True:
        found = sample(row)
        samples.append(found)
        guess = None if found is None or found.token_id in end_ids else guesses.get((row - 1, found.token_id))
        if guess is None:
            return AcceptedTokens(tuple(samples), tuple(accepted), row)
        accepted.append(guess)
        row = 1 + guess


def children(draft: Draft) -> dict[tuple[int, int], int]:
    """(parent, token) -> index of the guess."""
    pairs = zip(draft.parents, draft.token_ids, strict=True)
    return {pair: guess for guess, pair in enumerate(pairs)}
