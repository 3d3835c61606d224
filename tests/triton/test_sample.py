"""The sampling kernels against the host's sampler: the same tokens are kept, ties included, then the best one with its
noise is drawn."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from icc.compiler.backends.triton.interpreter import run_spec
from icc.compiler.backends.triton.kernels.sample import SampleKernel
from icc.compiler.backends.triton.objects.compile import compile_specs
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.targets import TARGETS
from icc.runtime.format.manifest import Limits
from icc.runtime.format.plan import LaunchArg, OutputArg, SampledArg, SamplingArg, ScratchArg
from icc.runtime.requests.sampler import _nucleus, largest_of, token_logprob
from interpreting import TUNER

LIMITS = Limits(max_seq_len=256, max_batch_size=64, max_step_tokens=128)


@dataclass(frozen=True)
class Row:
    """One row's parameters."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 7
    counter: int = 0


def sample(logits: np.ndarray, rows: list[Row]) -> dict[str, np.ndarray]:
    """Run both kernels on float32 [L, vocab]; the rows lie 3 elements apart."""
    count, vocab = logits.shape
    kernel = SampleKernel(vocab=vocab, stride=vocab + 3)
    padded = torch.full((count, vocab + 3), torch.nan)
    padded[:, :vocab] = torch.from_numpy(logits)
    seeds = np.array([row.seed for row in rows], dtype=np.uint64).view(np.int32).reshape(-1, 2)
    values: dict[LaunchArg, torch.Tensor | int] = {OutputArg("logits"): padded}
    values[SamplingArg("seed")] = torch.from_numpy(seeds.copy())
    for name in ("temperature", "top_k", "top_p", "min_p", "counter"):
        kind = torch.int32 if name in ("top_k", "counter") else torch.float32
        values[SamplingArg(name)] = torch.tensor([getattr(row, name) for row in rows], dtype=kind)
    for name in ("token", "top_ids"):
        values[SampledArg(name)] = torch.full((count, 20 if name == "top_ids" else 1), -5, dtype=torch.int32)
    for name in ("logprob", "top_logprobs"):
        values[SampledArg(name)] = torch.full((count, 20 if name == "top_logprobs" else 1), 5.0)
    shape = Shape(count, True)
    for name, size in kernel.scratch(shape, LIMITS, TUNER).items():
        values[ScratchArg(name)] = torch.full((size,), 255, dtype=torch.uint8)
    for spec in kernel.launches(shape, LIMITS, TUNER):
        run_spec(spec, values, {"num_logit_rows": count})
    return {n: values[SampledArg(n)].numpy() for n in ("token", "logprob", "top_ids", "top_logprobs")}  # type: ignore[union-attr]


def philox(seed: np.ndarray | int, counter: np.ndarray | int, token: np.ndarray) -> np.ndarray:
    """The 32 random bits of tokens: Philox4x32-10 (Salmon et al. 2011). Arguments broadcast."""
    seed, counter, token = np.broadcast_arrays(np.asarray(seed, np.uint64), np.asarray(counter, np.uint64), token)
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    c = [(token // 4).astype(np.uint64), counter, np.zeros_like(counter), np.zeros_like(counter)]
    key = [seed & mask, seed >> half]
    for _ in range(10):
        low, high = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(high >> half) ^ c[1] ^ key[0], high & mask, (low >> half) ^ c[3] ^ key[1], low & mask]
        key = [(key[0] + np.uint64(0x9E3779B9)) & mask, (key[1] + np.uint64(0xBB67AE85)) & mask]
    return np.choose(token % 4, c)


def kept(logits: np.ndarray, row: Row) -> np.ndarray:
    """The tokens that the host's sampler draws from, as in runtime/requests/sampler.py draw."""
    tokens = largest_of(logits, row.top_k) if 0 < row.top_k < len(logits) else np.arange(len(logits))
    weights = np.exp((logits[tokens] - logits.max()) / np.float32(row.temperature))
    if row.top_p < 1:
        inside = _nucleus(weights, row.top_p, ordered=0 < row.top_k < len(logits))
        tokens, weights = tokens[inside], weights[inside]
    return tokens[weights >= row.min_p]


def expected(logits: np.ndarray, row: Row) -> int:
    """The token of a row by definition: the best of the kept ones after adding the noise."""
    if row.temperature == 0:
        return int(logits.argmax())
    tokens = kept(logits, row)
    u = (philox(row.seed, row.counter, tokens) + 0.5) / 2**32
    return int(tokens[np.argmax(logits[tokens].astype(float) / row.temperature - np.log(-np.log1p(-u)))])


KINDS = {  # kinds of logits, and parameters to try: some keep few tokens, some more than the scan lists
    "spread": (
        Row(), Row(0.7), Row(1.3, top_k=5), Row(0.9, top_p=0.5), Row(2.0, top_k=30, top_p=0.7), Row(1.0, min_p=0.2),
    ),
    "flat": (
        Row(), Row(1.0, top_k=60), Row(0.5, top_p=0.9), Row(1.0, top_k=70, top_p=0.6, min_p=0.9),
        Row(3.0, top_k=10**6), Row(1.0, min_p=0.99),
    ),
    "ties": (Row(), Row(0.6, top_k=1), Row(1.7, top_k=40), Row(1.1, top_p=0.0), Row(1.0, top_k=33, top_p=0.4)),
    "few": (Row(), Row(0.8), Row(1.0, top_k=90), Row(1.4, top_p=0.9999), Row(1.2, top_k=4, min_p=0.01)),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [97, 2500])
def test_tokens(kind: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = [
        replace(row, seed=int(rng.integers(2**64, dtype=np.uint64)), counter=i) for i, row in enumerate(KINDS[kind])
    ]
    logits = rng.standard_normal((len(rows), vocab)).astype(np.float32)
    logits = {"spread": logits * 3, "flat": logits * 0.01, "ties": np.round(logits), "few": logits}[kind]
    if kind == "few":  # as masked by a grammar
        logits[rng.random(logits.shape) < 0.9] = -np.inf
        logits[:, 50] = -0.0
    got = sample(logits, rows)
    wanted = [expected(x, row) for x, row in zip(logits, rows, strict=True)]
    assert got["token"][:, 0].tolist() == wanted
    check_logprobs(logits, got)


def check_logprobs(logits: np.ndarray, got: dict[str, np.ndarray]) -> None:
    """Check the log-probabilities of the drawn and of the likeliest tokens, in order; ids of impossible tokens are
    -1."""
    for i, x in enumerate(logits):
        reference = token_logprob(x, int(got["token"][i, 0]), 20)
        finite = [(token, logprob) for token, logprob in reference.top if logprob > -np.inf]
        assert got["top_ids"][i].tolist() == [token for token, _ in finite] + [-1] * (20 - len(finite))
        np.testing.assert_allclose(got["top_logprobs"][i, : len(finite)], [p for _, p in finite], rtol=1e-5, atol=1e-5)
        assert (got["top_logprobs"][i, len(finite) :] == -np.inf).all()
        np.testing.assert_allclose(got["logprob"][i, 0], reference.logprob, rtol=1e-5, atol=1e-5)


def test_the_token_that_reaches_top_p_is_kept() -> None:
    """Two of the tokens with 30, 25 and 15 % make up 50 %, and 24 draws yield both."""
    logits = np.log(np.array([0.3, 0.15, 0.25, *[0.3 / 94] * 94], np.float32))
    rows = [Row(1.0, top_p=0.5, counter=i) for i in range(24)]
    found = sample(np.stack([logits] * len(rows)), rows)["token"][:, 0].tolist()
    assert found == [expected(logits, row) for row in rows] and {*found} == {0, 2}


def test_rows_that_are_not_numbers() -> None:
    logits = np.zeros((4, 97), dtype=np.float32)
    logits[0, 60], logits[1], logits[2, 3], logits[3, 5] = np.nan, -np.inf, np.inf, 4.0
    got = sample(logits, [Row(), Row(1.0), Row(1.0, top_k=3), Row(0.0, top_k=3)])
    assert got["token"][:, 0].tolist() == [-1, -1, -1, 5]
    assert np.isnan(got["logprob"][:3]).all()


def test_ties_in_all_of_a_large_vocabulary() -> None:
    """The scan of each part finds more ties than it has slots; the lowest token ids win."""
    logits = np.zeros((2, 2500), dtype=np.float32)
    rows = [Row(1.0, top_k=25, seed=2**63 + 5), Row(1.0, top_p=0.5, seed=3)]
    got = sample(logits, rows)
    assert got["token"][:, 0].tolist() == [expected(x, row) for x, row in zip(logits, rows, strict=True)]
    assert got["top_ids"].tolist() == [list(range(20))] * 2


def test_a_row_does_not_depend_on_its_mates_or_its_place() -> None:
    logits = np.random.default_rng(0).standard_normal((5, 97)).astype(np.float32)
    rows = [Row(1.0, top_k=20, seed=i, counter=9) for i in range(5)]
    together = sample(logits, rows)["token"]
    assert (sample(logits[::-1].copy(), rows[::-1])["token"][::-1] == together).all()
    assert len({int(sample(logits[:1], [replace(rows[0], counter=c)])["token"][0, 0]) for c in range(4)}) > 1


def test_distribution() -> None:
    """Chi-square test of the kernels' noise (which test_tokens compares with `philox`) over 100,000 draws of 8
    tokens."""
    logits = np.array([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.2])
    for seeds, counters in ((range(100), range(1000)), (range(2**40, 2**40 + 100_000), range(1))):
        u = (philox(np.array(seeds)[:, None, None], np.array(counters)[:, None], np.arange(8)) + 0.5) / 2**32
        counts = np.bincount((logits - np.log(-np.log1p(-u))).argmax(-1).reshape(-1), minlength=8)
        wanted = np.exp(logits) / np.exp(logits).sum() * 100_000
        assert ((counts - wanted) ** 2 / wanted).sum() < 24.3  # 7 degrees of freedom, 1 in 1000


def test_objects_do_not_spill() -> None:
    """Compiled for a GPU: sampling runs in every decode step, so it must not spill."""
    target = TARGETS["h100"]
    kernels = [SampleKernel(vocab=vocab) for vocab in (97, 128256)]
    specs = [spec for kernel in kernels for spec in kernel.launches(Shape(8, True), LIMITS, TUNER)]
    assert all(found.spill_bytes == 0 for found in compile_specs(specs, target).values())
