"""Suffix decoding: what followed, most often, where a text went on like this one (SuffixDecoding, Oliaro et al. 2024).

As there, a request is compared with its own text and with the answers to requests before it; the longest ending that
comes again decides, and the longer it is, the longer the guess. There a tree of all suffixes holds the texts; here a
table of the places of each few tokens does, of which the newest are compared token by token.
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

GRAM = 3  # tokens that a place must share with the ending to be compared
PLACES = 32  # the newest places that are compared
LONGEST = 64  # tokens of an ending that are compared
FACTOR = 2  # guesses per token of the ending that came again
MAX_GUESSES = 24
KEPT = 1 << 17  # tokens of past answers, and as many of older ones
_BITS = 21  # of a token in a key
_MASK = (1 << _BITS * GRAM) - 1
_BETWEEN = -1  # stands between two texts


class Texts:
    """Texts, one behind the other, and the places of each `GRAM` tokens of those with the same salt. About 200 bytes
    per token."""

    def __init__(self) -> None:
        self.tokens = array("i")
        self._newest: dict[int, int] = {}  # by key: the place behind the last such tokens
        self._earlier = array("i")  # by place: the one before it with the same key, or -1
        self._begin(b"")

    def __len__(self) -> int:
        return len(self.tokens)

    def _begin(self, salt: bytes) -> None:
        self._salt, self._gram, self._fresh = _salted(salt), 0, 0  # _fresh: tokens of this text

    def grow(self, fresh: Sequence[int]) -> None:
        """More tokens of the last text."""
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
        """A whole text."""
        self._begin(salt)
        self.grow(text)
        self.tokens.append(_BETWEEN)
        self._earlier.append(-1)

    def places(self, ending: Sequence[int], salt: bytes) -> Iterator[int]:
        """The places behind the last `GRAM` tokens of an ending, the newest first."""
        gram = 0
        for token in ending[-GRAM:]:
            gram = gram << _BITS | token
        place = self._newest.get(_salted(salt) | gram, -1)
        while place >= 0:
            yield place
            place = self._earlier[place - 1]

    def shared(self, place: int, ending: Sequence[int]) -> int:
        """How many tokens before a place are those of the ending."""
        count, most = GRAM, min(place, len(ending))
        while count < most and self.tokens[place - 1 - count] == ending[-1 - count]:
            count += 1
        return count

    def token(self, place: int, ahead: int) -> int | None:
        """The token so far behind a place; a text that ends there goes on with what followed the place. None: it ended
        before."""
        at = place + ahead
        if at >= len(self.tokens):
            at = place + ahead % (len(self.tokens) - place)
        found = self.tokens[at]
        return None if found == _BETWEEN else found


@dataclass(frozen=True)
class Guess:
    """Tokens, and the share of the places with the longest common ending that agrees on each and all before it."""

    tokens: list[int]
    shares: list[float]


def _salted(salt: bytes) -> int:
    return int.from_bytes(salt) << _BITS * GRAM


def guess(texts: Texts, ending: Sequence[int], count: int, salt: bytes = b"") -> Guess:
    """At most `count` tokens that may follow an ending; none where it has not come before."""
    longest, best = 0, list[int]()
    for place in islice(texts.places(ending, salt), PLACES):
        if place == len(texts) or texts.token(place, 0) is None:  # the ending itself, or that of another text
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
    """Guesses chains out of each request's own text, and out of past answers to requests with the same salt: what
    another client's answers were does not show in how fast one's own are. Costs no step of any model."""

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
        """The guess of which most tokens are expected to be right."""
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
        if len(self._past) > KEPT:  # what is older than the older ones is forgotten
            self._past, self._older = Texts(), self._past

    def close(self) -> None:
        self._own.clear()
        self._running.clear()
        self._past, self._older = Texts(), Texts()
