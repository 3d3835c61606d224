"""Prompt lookup: guesses the tokens that followed the last earlier occurrence of the text's ending ("inference with
reference", Yang et al. 2023; prompt lookup decoding, Saxena 2023)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ..batch.scheduled import Draft
from ..requests.generation import Generation
from .drafter import Drafter, Proposal, Wish, chain_chances

GRAM = 3  # the number of tokens of the ending to look up
MAX_GUESSES = 16
_WIDTH = array("i").itemsize


class _Text:
    """A request's tokens as bytes: searching them is cheaper than keeping an index, most of which would not be used."""

    def __init__(self) -> None:
        self.length = 0  # in tokens
        self._bytes = bytearray()

    def grow(self, fresh: Sequence[int]) -> None:
        self._bytes += array("i", fresh).tobytes()
        self.length += len(fresh)

    def place(self) -> int | None:
        """The index of the token after the last earlier occurrence of the text's ending; None if there is none."""
        ending = self._bytes[-GRAM * _WIDTH :]
        at, end = -1, len(self._bytes) - _WIDTH
        if self.length > GRAM:
            at = self._bytes.rfind(ending, 0, end)
        while at % _WIDTH and at > 0:  # a match that begins within a token
            at = self._bytes.rfind(ending, 0, at + len(ending) - 1)
        return at // _WIDTH + GRAM if at >= 0 else None

    def following(self, start: int, count: int) -> list[int]:
        """`count` tokens from `start` on; at the end of the text these tokens are repeated."""
        tokens = array("i", bytes(self._bytes[start * _WIDTH : (start + count) * _WIDTH])).tolist()
        return (tokens * (count // len(tokens) + 1))[:count]


class NgramDrafter(Drafter):
    """Guesses chains from each request's own prompt and output. Runs no model."""

    name = "ngram"
    first_rate = 0.6

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        found: dict[int, Proposal] = {}
        for wish in wishes:
            text = self._text(wish.generation)
            start = text.place()
            if start is not None:
                guesses = text.following(start, min(wish.count, MAX_GUESSES))
                chances = chain_chances(len(guesses), wish.rate)
                found[wish.generation.request_id] = Proposal(Draft.chain(guesses), chances)
        return found

    def knows(self, generation: Generation) -> bool:
        return self._text(generation).place() is not None

    def _text(self, generation: Generation) -> _Text:
        text = self._texts.get(generation.request_id)
        if text is None:
            text = self._texts[generation.request_id] = _Text()
            text.grow(generation.prompt)
        if (behind := len(generation.prompt) + len(generation.token_ids) - text.length) > 0:
            text.grow(generation.token_ids[-behind:])
        return text

    def forget(self, request_id: int) -> None:
        self._texts.pop(request_id, None)

    def close(self) -> None:
        self._texts.clear()
