"""Suffix decoding: guesses the tokens that most often followed the same ending earlier (SuffixDecoding, Oliaro et al.
2024).

As in the paper, a request is compared with its own text and with answers to earlier requests; the longest matching
ending decides, and the longer it is, the longer the guess. The paper keeps texts in a suffix tree; here a table has the
places of all n-grams of GRAM tokens, and the newest places are compared token by token.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ..batch.scheduled import Draft
from ..requests.generation import Generation
from .drafter import Drafter, Proposal, Wish

GRAM = 3  # tokens that a place must share with the ending to be considered
PLACES = 32  # the number of newest places that are compared
LONGEST = 64  # the most tokens of an ending that are compared
FACTOR = 2  # guesses per token of the matching ending
MAX_GUESSES = 24
KEPT = 1 << 17  # tokens of past answers; as many tokens of older ones are kept, too
_BITS = 21  # bits of a token in a key
_MASK = (1 << _BITS * GRAM) - 1
_BETWEEN = -1  # separates two texts


class Texts:
    """Concatenated texts, with an index of the places of all runs of `GRAM` tokens, by salt. About 200 bytes per
    token."""

    def __init__(self) -> None:
        self.tokens = array("i")
        self._newest: dict[int, int] = {}  # by key: the place after its last occurrence
        self._earlier = array("i")  # by place: the previous place with the same key, or -1
        self._begin(b"")

    def __len__(self) -> int:
        return len(self.tokens)

    def _begin(self, salt: bytes) -> None:
        self._salt, self._gram, self._fresh = _salted(salt), 0, 0  # _fresh: number of tokens of this text

    def grow(self, fresh: Sequence[int]) -> None:
        """Append tokens to the last text."""
        for token in fresh:
            self.tokens.append(token)
            self._gram = (self._gram << _BITS | token) & _MASK
            self._fresh += 1
            earlier = -1
            if self._fresh >= GRAM:
                key = self._salt | self._gram
                earlier = self._newest.get(key, -1)
                self._newest[key] = len(self.tokens)
            self._earlier.append(earlier)

    def add(self, text: Sequence[int], salt: bytes) -> None:
        """Add a complete text."""
        self._begin(salt)
        self.grow(text)
        self.tokens.append(_BETWEEN)
        self._earlier.append(-1)

    def places(self, ending: Sequence[int], salt: bytes) -> Iterator[int]:
        """The places after all occurrences of an ending's last `GRAM` tokens, newest first."""
        gram = 0
        for token in ending[-GRAM:]:
            gram = gram << _BITS | token
        place = self._newest.get(_salted(salt) | gram, -1)
        while place >= 0:
            yield place
            place = self._earlier[place - 1]

    def shared(self, place: int, ending: Sequence[int]) -> int:
        """How many tokens before a place match the ending."""
        count, most = GRAM, min(place, len(ending))
        if self.tokens[place - most : place] == ending[-most:]:  # all of it, as in texts that repeat
            return most
        while count < most and self.tokens[place - 1 - count] == ending[-1 - count]:
            count += 1
        return count

    def token(self, place: int, ahead: int) -> int | None:
        """The token `ahead` tokens after a place; the last text is continued by repeating what followed the place. None
        if an earlier text ends before."""
        at = place + ahead
        if at >= len(self.tokens):
            at = place + ahead % (len(self.tokens) - place)
        found = self.tokens[at]
        return None if found == _BETWEEN else found


@dataclass(frozen=True)
class Guess:
    """Guessed tokens. shares: for each, the share of the places with the longest matching ending that agree on it and
    on all tokens before."""

    tokens: list[int]
    shares: list[float]


def _salted(salt: bytes) -> int:
    return int.from_bytes(salt) << _BITS * GRAM


def guess(texts: Texts, ending: Sequence[int], count: int, salt: bytes = b"") -> Guess:
    """At most `count` tokens that may follow an ending; none if it has not occurred before."""
    longest, best = 0, list[int]()
    for place in islice(texts.places(ending, salt), PLACES):
        if place == len(texts) or texts.token(place, 0) is None:  # the ending itself, or the end of another text
            continue
        shared = texts.shared(place, ending)
        if shared > longest:
            longest, best = shared, []
        if shared == longest:
            best.append(place)
    found, total = Guess([], []), len(best)
    for ahead in range(min(count, FACTOR * longest)):
        follow = [(place, token) for place in best if (token := texts.token(place, ahead)) is not None]
        if not follow:
            break
        token, agree = Counter(token for _, token in follow).most_common(1)[0]
        best = [place for place, found in follow if found == token]
        found.tokens.append(token)
        found.shares.append(agree / total)
    return found


class SuffixDrafter(Drafter):
    """Guesses chains from each request's own text, and from past answers to requests with the same salt, so that the
    speed of one client's requests does not reveal another client's answers. Runs no model."""

    name = "suffix"
    first_rate = 0.6

    def __init__(self) -> None:
        self._own: dict[int, Texts] = {}
        self._running: dict[int, Generation] = {}
        self._past, self._older = Texts(), Texts()

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        found: dict[int, Proposal] = {}
        for wish in wishes:
            best = self._best(wish.generation, min(wish.count, MAX_GUESSES))
            if best.tokens:
                chances = tuple(share * wish.rate ** (depth + 1) for depth, share in enumerate(best.shares))
                found[wish.generation.request_id] = Proposal(Draft.chain(best.tokens), chances)
        return found

    def knows(self, generation: Generation) -> bool:
        own = self._text(generation)
        ending, salt = own.tokens[-GRAM:], generation.spec.salt
        earlier = any(place < len(own) for place in islice(own.places(ending, b""), 2))
        return earlier or any(any(texts.places(ending, salt)) for texts in self._answers)

    @property
    def _answers(self) -> tuple[Texts, Texts]:
        return self._past, self._older

    def _best(self, generation: Generation, count: int) -> Guess:
        """The guess with the largest expected number of right tokens."""
        own = self._text(generation)
        ending, salt = own.tokens[-LONGEST:], generation.spec.salt
        guesses = [guess(own, ending, count), *(guess(texts, ending, count, salt) for texts in self._answers)]
        return max(guesses, key=lambda one: sum(one.shares))

    def _text(self, generation: Generation) -> Texts:
        text = self._own.get(generation.request_id)
        if text is None:
            text = self._own[generation.request_id] = Texts()
            self._running[generation.request_id] = generation
            text.grow(generation.prompt)
        if (behind := len(generation.prompt) + len(generation.token_ids) - len(text)) > 0:
            text.grow(generation.token_ids[-behind:])
        return text

    def forget(self, request_id: int) -> None:
        self._own.pop(request_id, None)
        generation = self._running.pop(request_id, None)
        if generation is None or not generation.token_ids:
            return
        self._past.add([*generation.prompt[-GRAM:], *generation.token_ids], generation.spec.salt)
        if len(self._past) > KEPT:  # the oldest answers are dropped
            self._past, self._older = Texts(), self._past

    def close(self) -> None:
        self._own.clear()
        self._running.clear()
        self._past, self._older = Texts(), Texts()
