"""Suffix decoding: it guesses the most frequent continuation of the longest matching suffix; here found by brute
force."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from icc.runtime.batch.scheduled import Draft
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import context_hash
from icc.runtime.requests.params import SamplingParams
from icc.runtime.speculate import suffix
from icc.runtime.speculate.drafter import Proposal, Wish
from icc.runtime.speculate.suffix import FACTOR, GRAM, SuffixDrafter, Texts, guess

MakeLLM = Callable[..., LLM]
TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def everywhere(texts: Sequence[Sequence[int]], ending: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """`guess` by brute force over texts that have ended: tokens and their shares. Stops where two tokens are equally
    frequent."""
    found: dict[int, list[Sequence[int]]] = {}
    for text in texts:
        for place in range(GRAM, len(text)):
            shared = 0
            while shared < min(place, len(ending)) and text[place - 1 - shared] == ending[-1 - shared]:
                shared += 1
            found.setdefault(shared, []).append(text[place:])
    longest = max((shared for shared in found if shared >= GRAM), default=0)
    follow, tokens, shares = found.get(longest, []) if longest else [], list[int](), list[float]()
    for ahead in range(min(count, FACTOR * longest)):
        counts = Counter(text[ahead] for text in follow if len(text) > ahead).most_common()
        if not counts:
            break
        if len(counts) > 1 and counts[0][1] == counts[1][1]:
            return tokens, shares  # the newest text would decide, which is not simulated here
        tokens.append(counts[0][0])
        shares.append(counts[0][1] / len(found[longest]))
        follow = [text for text in follow if len(text) > ahead and text[ahead] == counts[0][0]]
    return tokens, shares


@given(texts=st.lists(TEXT, max_size=4), ending=st.lists(st.integers(0, 2), min_size=GRAM, max_size=12))
def test_guesses_follow_the_longest_ending_most_often(texts: list[list[int]], ending: list[int]) -> None:
    store = Texts()
    for text in texts:
        store.add(text, b"")
    found = guess(store, ending, 8)
    tokens, shares = everywhere(texts, ending, 8)
    assert found.tokens[: len(tokens)] == tokens and found.shares[: len(shares)] == pytest.approx(shares)
    assert len(found.tokens) <= 8 and bool(found.tokens) >= bool(tokens)


@pytest.mark.parametrize("period", [GRAM, 5, 9])
def test_a_text_that_repeats_itself_goes_on_so(period: int) -> None:
    """A guess from the request's own text continues beyond the end of that text."""
    text, tokens = Texts(), list(range(10, 10 + period))
    text.grow([7, *tokens * 2, *tokens[:2]])
    expected = [*tokens[2:], *tokens * 3]
    assert guess(text, text.tokens, 2 * period).tokens == expected[: 2 * period]


def test_salts_and_texts_do_not_mix() -> None:
    store = Texts()
    store.add([1, 2, 3, 4], b"a")
    store.add([5, 6, 1, 2], b"a")
    store.add([3, 8], b"a")
    assert guess(store, [1, 2, 3], 4, b"a").tokens == [4], "no guess runs into the next text"
    assert guess(store, [1, 2, 3], 4, b"b").tokens == guess(store, [1, 2, 3], 4).tokens == []
    assert guess(store, [2, 3, 8], 4, b"a").tokens == [], "nor does an ending begin in the text before"


def test_the_second_answer_comes_out_of_the_first(make_llm: MakeLLM) -> None:
    """For the same prompt all but the first tokens are guessed, and the answer is the same."""
    llm = make_llm(SuffixDrafter(), rule=context_hash, num_blocks=200)
    llm.loop.speculator.adaptive = False
    params, prompt = SamplingParams(max_tokens=60, ignore_eos=True), [5, 9, 2, 30]
    [first] = llm.generate([prompt], params)
    before = llm.loop.speculator.counts.accepted
    [second] = llm.generate([prompt], params)
    assert second.token_ids == first.token_ids
    assert llm.loop.speculator.counts.accepted - before > 45


def test_answers_to_other_salts_are_not_used() -> None:
    """Three requests with one prompt: the second has the salt of the first, the third has another."""

    def request(number: int, salt: bytes) -> Any:
        return SimpleNamespace(
            request_id=number, prompt=(1, 2, 3), token_ids=[], spec=SimpleNamespace(salt=salt), params=None
        )

    drafter = SuffixDrafter()
    first = request(0, b"a")
    assert not drafter.knows(first)
    first.token_ids += [4, 5, 6]
    assert drafter.propose([Wish(first, 8, 0.5)]) == {}
    drafter.forget(0)
    second, third = request(1, b"a"), request(2, b"b")
    assert drafter.knows(second) and not drafter.knows(third)
    found = drafter.propose([Wish(second, 8, 0.5), Wish(third, 8, 0.5)])
    assert found == {1: Proposal(Draft.chain([4, 5, 6]), (0.5, 0.25, 0.125))}


def test_old_answers_go(monkeypatch: pytest.MonkeyPatch, make_llm: MakeLLM) -> None:
    monkeypatch.setattr(suffix, "KEPT", 100)
    drafter = SuffixDrafter()
    llm = make_llm(drafter, num_blocks=200)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for start in range(12):
        llm.generate([[start, 7, 9, 1]], params)
        assert sum(map(len, drafter._answers)) < 2 * (100 + 30 + GRAM + 1)
    assert not drafter._own and not drafter._running
