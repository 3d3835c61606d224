"""Which sequences share KV blocks: it depends on their tokens, their salts, and the token at which their adapter
begins."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from icc.runtime.kv.sequence import CachedSequence

BLOCK = 4


@st.composite
def sequences(draw: st.DrawFn) -> dict[str, Any]:
    """Sequences of few different tokens, salts and adapters, so that many are equal."""
    tokens = draw(st.lists(st.integers(0, 1), min_size=4 * BLOCK, max_size=4 * BLOCK))
    prefix = draw(st.integers(0, 4)) * BLOCK
    adapter = draw(st.sampled_from([b"", b"one", b"two"]))
    return {
        "tokens": [0] * prefix + tokens[prefix:],
        "salt": draw(st.sampled_from([b"", b"client"])),
        "own_salt": adapter,
        "own_from": draw(st.integers(0, 5 * BLOCK)) if adapter else 0,
    }


def computed(sequence: dict[str, Any], end: int) -> tuple[Any, ...]:
    """All that the KV of the first `end` tokens depends on: the salt, and each token with its adapter."""
    adapter, begin = sequence["own_salt"], sequence["own_from"]
    rows = tuple((token, adapter if at >= begin else b"") for at, token in enumerate(sequence["tokens"][:end]))
    return sequence["salt"], rows


@settings(max_examples=300)
@given(sequences(), st.data())
def test_blocks_are_shared_where_their_content_is_the_same(first: dict[str, Any], data: st.DataObject) -> None:
    second = data.draw(sequences())
    for name in data.draw(st.sets(st.sampled_from([*first]))):  # often they differ in little only
        second[name] = first[name]
    one, two = CachedSequence(**first), CachedSequence(**second)
    for index in range(4):
        end = (index + 1) * BLOCK
        is_shared = one.key(index, BLOCK) == two.key(index, BLOCK)
        alike = computed(first, end) == computed(second, end)
        assert alike or not is_shared  # no block is shared between different contents
        begins = {s["own_from"] for s in (first, second) if s["own_salt"] and s["own_from"] < end}
        if alike and len({begin // BLOCK for begin in begins}) < 2:
            assert is_shared
