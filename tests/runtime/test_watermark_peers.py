"""Watermarks defined by others: texts recorded from vLLM's Gumbel-max, and transformers' SynthID-Text."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from icc.runtime.requests.params import SamplingParams
from icc.runtime.requests.sampler import Sampler
from icc.runtime.watermark.detect import detect, gamma_tail
from icc.runtime.watermark.gumbel import _philox, two_keys, uniforms
from icc.runtime.watermark.marking import TournamentMarking
from icc.runtime.watermark.settings import Watermark
from icc.runtime.watermark.tournament import bits
from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor

VOCAB = 128
KEYS = (654, 400, 836, 123, 340, 443, 597, 160, 57, 2**62 + 3)

# Texts that vLLM marked with key 42 (its tests/watermarking/watermarking_goldens.json: "gumbel-philox-key42-cw4" and
# "dual-key-gumbel-philox-key42-cw4-alpha-mismatch")
GUMBEL = [
    *(46, 24, 45, 80, 14, 26, 22, 124, 21, 45, 16, 30, 5, 89, 0, 10, 27, 70, 80, 62, 1, 11, 117, 53, 10, 45, 94, 37),
    *(43, 22, 78, 49, 119, 9, 22, 118, 82, 75, 32, 24, 84, 27, 122, 66, 78, 64, 124, 17, 91, 12, 51, 15, 75, 64, 127),
    *(45, 112, 15, 83, 114, 121, 109, 24, 77),
]
DUAL = [
    *(46, 56, 6, 122, 30, 100, 121, 67, 63, 116, 13, 65, 90, 47, 25, 88, 120, 31, 2, 37, 40, 34, 92, 28, 45, 126, 94),
    *(90, 18, 36, 74, 102, 10, 13, 101, 51, 29, 29, 46, 81, 63, 2, 29, 78, 121, 89, 124, 109, 123, 34, 30, 93, 4, 110),
    *(28, 34, 105, 41, 5, 48, 81, 120, 60, 70),
]


def test_philox_gives_the_numbers_that_its_authors_published() -> None:
    """Random123's known answers of philox4x32-10."""
    assert [*_philox([0, 0, 0, 0], 0, 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    pi = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344
    found = _philox([np.array([word], dtype=np.uint64) for word in pi], 0xA4093822, 0x299F31D0)
    assert np.stack(found)[:, 0].tolist() == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_numbers_of_tokens_are_vllms() -> None:
    """Its test_philox_compatibility_vector."""
    expected = {(1, 2, 3, 4): (1661833, 10571167), (4, 5, 6, 7): (9742331, 13375724)}
    for before, mantissas in expected.items():
        numbers = np.array([(one + 1) / (2**24 + 1) for one in mantissas], dtype=np.float32)
        assert np.array_equal(uniforms(42, before, VOCAB)[7:9], numbers)
        assert np.array_equal(uniforms(42, before, VOCAB, np.array([7, 8])), numbers)
    for width in (1, 3, 5, 16):  # a part of a block, and several blocks
        every = uniforms(2**64 - 1, range(width), 131)
        some = np.array([130, 0, 77, 5])
        assert every.shape == (131,) and np.array_equal(uniforms(2**64 - 1, range(width), 131, some), every[some])
    assert two_keys(42) == (37150756557148556, 15826636237805488045)


@pytest.mark.parametrize(
    ("mark", "tokens", "p_value"),
    [
        (Watermark(42, "gumbel"), GUMBEL, 7.128196280874065e-61),
        (Watermark(43, "gumbel"), GUMBEL, 0.5208447936891313),
        (Watermark(42, "dual_key_gumbel", alpha=0.2), DUAL, 1.6569954931292397e-49),
    ],
)
def test_texts_that_vllm_marked_are_told_as_it_tells_them(mark: Watermark, tokens: list[int], p_value: float) -> None:
    found = detect(tokens, mark, VOCAB)
    assert found.tokens == 64 and found.p_value == pytest.approx(p_value, rel=1e-6)
    assert found.marked == (p_value < 1e-4)


@pytest.mark.parametrize(("shape", "value"), [(3.5, 1.2), (64, 63.3), (64, 296.0), (200.7, 180.0), (900.0, 1000.0)])
def test_the_tail_of_a_gamma_variable_is_torchs(shape: float, value: float) -> None:
    expected = torch.special.gammaincc(*(torch.tensor(one, dtype=torch.float64) for one in (shape, value)))
    assert gamma_tail(shape, value) == pytest.approx(float(expected), rel=1e-8)


def test_of_two_keys_each_marks_its_share() -> None:
    """Without tokens before, the token that each key takes is known."""
    row = np.zeros(64, dtype=np.float32)
    mark = Watermark(7, "dual_key_gumbel", alpha=0.3)
    taken = [int(uniforms(key, (-1,) * 4, 64).argmax()) for key in two_keys(7)]
    drawn: Counter[int] = Counter()
    for seed in range(2000):
        sample = Sampler(SamplingParams(temperature=1.0, seed=seed, watermark=mark), [5], 64).sample(row)
        assert sample is not None
        drawn[sample.token_id] += 1
    assert set(drawn) == set(taken)
    assert abs(drawn[taken[1]] - 600) < 3.3 * math.sqrt(2000 * 0.3 * 0.7)  # further away once in a thousand runs


def synthid() -> Any:
    """transformers' processor; typed Any, as it is declared to take LongTensor, which no function returns."""
    return SynthIDTextWatermarkLogitsProcessor(
        ngram_len=5,
        keys=list(KEYS),
        sampling_table_size=2**16,
        sampling_table_seed=0,
        context_history_size=1024,
        device=torch.device("cpu"),
    )


def test_bits_of_tokens_are_transformers() -> None:
    text = np.random.default_rng(0).integers(0, 50000, size=12)
    expected = synthid().compute_g_values(torch.from_numpy(text)[None])[0]
    found = [bits(KEYS, text[at : at + 4].tolist(), text[at + 4 : at + 5])[0] for at in range(8)]
    assert np.array_equal(np.stack(found), expected)


def test_probabilities_after_tournaments_are_transformers() -> None:
    """From the first token on, with few remaining tokens, and with repeated contexts."""
    processor, marking = synthid(), TournamentMarking(Watermark(KEYS, "synthid"))
    rows = np.random.default_rng(1).normal(scale=2, size=(40, VOCAB)).astype(np.float32)
    context = [3]
    for place, row in enumerate(rows):
        left = np.sort(np.random.default_rng(place).permutation(VOCAB)[: 30 if place % 2 else VOCAB])
        alone = np.full(VOCAB, -np.inf, dtype=np.float32)
        alone[left] = row[left]
        expected = torch.softmax(processor(torch.tensor([context]), torch.from_numpy(alone)[None])[0], 0).numpy()
        weights = np.exp(row[left] - row[left].max())
        found = marking.weighed(left, weights, 0.5)
        np.testing.assert_allclose(found / found.sum(), expected[left], atol=1e-6)
        best = marking.biased(alone)
        assert int(best.argmax()) == int(expected.argmax())
        token = int(left[place % 3])
        context.append(token if place < 20 else context[place - 15])  # then earlier tokens are repeated
        marking.push(context[-1])


def test_synthids_mark_is_found_with_its_keys_only() -> None:
    def written(mark: Watermark | None) -> list[int]:
        rows = np.random.default_rng(9).normal(size=(150, VOCAB)).astype(np.float32)
        sampler = Sampler(SamplingParams(temperature=1.0, seed=3, top_k=64, watermark=mark), [1, 2], VOCAB)
        return [sample.token_id for row in rows if (sample := sampler.sample(row)) is not None]

    mark = Watermark(KEYS, "synthid")
    found = detect(written(mark), mark, VOCAB)
    assert found.marked and found.p_value < 1e-6 and found.tokens > 140 and found.green is None
    assert not detect(written(None), mark, VOCAB).marked
    assert not detect(written(mark), Watermark((1, 2, 3), "synthid"), VOCAB).marked
