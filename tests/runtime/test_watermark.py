"""Watermarks: the same green lists and z-scores as transformers', the model's distribution under Gumbel's, and the
output of the commands."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from icc.runtime.cli.commands import main
from icc.runtime.errors import RequestError
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeDevice, FakeExecutor
from icc.runtime.requests.params import SamplingParams
from icc.runtime.requests.sampler import Sampler
from icc.runtime.speculate.speculator import Speculator
from icc.runtime.tokenizer import Tokenizer
from icc.runtime.watermark.detect import detect, gamma_tail
from icc.runtime.watermark.green_list import green_list, permuted
from icc.runtime.watermark.gumbel import uniforms
from icc.runtime.watermark.settings import Watermark, watermark
from oracle_drafters import Oracle
from transformers import LlamaConfig, WatermarkDetector
from transformers.generation.logits_process import WatermarkLogitsProcessor

KEY, VOCAB = 15485863, 258
MARKS = {
    "kgw": "kgw:9,bias=12",
    "gumbel": "gumbel:9",
    "dual_key_gumbel": "dual_key_gumbel:9,alpha=0.4",
    "synthid": "synthid:9+8+7+6+5+4",
}


@pytest.mark.parametrize(
    ("size", "count", "seed"),
    [(10, 10, 3), (258, 64, 97), (49152, 12288, KEY * 77), (128256, 32064, KEY * 128000), (2, 2, 1)],
)
def test_permutations_are_torchs(size: int, count: int, seed: int) -> None:
    expected = torch.randperm(size, generator=torch.Generator().manual_seed(seed % (2**64 - 1)))[:count]
    assert permuted(seed % (2**64 - 1), size, count).tolist() == expected.tolist()


@pytest.mark.parametrize(("key", "ratio", "bias"), [(KEY, 0.25, 2.0), (2**62 + 1, 0.5, 1.5), (7, 0.1, 10.0)])
def test_greedy_tokens_are_those_of_transformers_processor(key: int, ratio: float, bias: float) -> None:
    """The bias is applied after all changes that forbid tokens, as in `generate`."""
    processor = WatermarkLogitsProcessor(VOCAB, "cpu", ratio, bias, key)
    rows = np.random.default_rng(0).normal(size=(40, VOCAB)).astype(np.float32)
    mark = Watermark(key, ratio=ratio, bias=bias)
    sampler = Sampler(SamplingParams(temperature=0.0, watermark=mark, logit_bias={5: -100.0}), [3, 9], VOCAB)
    context = [3, 9]
    for row in rows:
        found = sampler.sample(row)
        forbidden = torch.from_numpy(row.copy())
        forbidden[5] -= 100.0
        expected = int(processor(torch.tensor([context]), forbidden[None])[0].argmax())
        assert found is not None and found.token_id == expected
        context.append(expected)
    assert not sampler.is_argmax and not sampler.is_plain and sampler.device_row() is None


def test_sampled_tokens_have_the_distribution_of_the_biased_logits() -> None:
    row = np.random.default_rng(1).normal(size=20).astype(np.float32)
    green = green_list(KEY, 4, 20, 0.25)
    params = {"temperature": 0.7, "top_k": 12, "watermark": Watermark(KEY, bias=1.5)}
    drawn = Counter(Sampler(SamplingParams(**params, seed=seed), [4], 20).sample(row).token_id for seed in range(4000))  # type: ignore[union-attr]
    kept = np.argsort(-row)[:12]
    weights = np.exp(row[kept] / 0.7) * np.where(green[kept], math.exp(1.5), 1.0)
    expected = 4000 * weights / weights.sum()
    assert set(drawn) <= set(kept.tolist())
    chi = sum((drawn[int(token)] - mean) ** 2 / mean for token, mean in zip(kept, expected, strict=True))
    assert chi < 31.3  # 11 degrees of freedom: exceeded once in a thousand runs


def test_over_keys_gumbels_tokens_have_the_models_distribution() -> None:
    row = np.random.default_rng(2).normal(size=10).astype(np.float32)
    drawn: Counter[int] = Counter()
    for key in range(1, 4001):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=0, watermark=Watermark(key, "gumbel")), [1, 2, 3, 4], 10)
        sample = sampler.sample(row)
        assert sample is not None
        drawn[sample.token_id] += 1
    weights = np.exp(row.astype(np.float64))
    expected = 4000 * weights / weights.sum()
    assert sum((drawn[token] - mean) ** 2 / mean for token, mean in enumerate(expected)) < 27.9  # 9 degrees


def test_z_scores_and_p_values_are_transformers() -> None:
    config = LlamaConfig(vocab_size=VOCAB, bos_token_id=VOCAB + 1)
    settings = {
        "greenlist_ratio": 0.25,
        "bias": 2.0,
        "hashing_key": KEY,
        "seeding_scheme": "lefthash",
        "context_width": 1,
    }
    oracle = WatermarkDetector(config, "cpu", settings, ignore_repeated_ngrams=True)
    for seed, bias in ((0, 0.0), (1, 2.0), (2, 6.0)):
        tokens = written(
            SamplingParams(max_tokens=150, temperature=1.0, seed=seed, watermark=Watermark(KEY, bias=bias))
        )
        found = detect(tokens, Watermark(KEY), VOCAB)
        expected = oracle(torch.tensor([tokens]), return_dict=True)
        assert (found.tokens, found.green) == (expected.num_tokens_scored[0], expected.num_green_tokens[0])
        assert found.z_score == pytest.approx(float(expected.z_score[0]))
        assert found.p_value == pytest.approx(float(expected.p_value[0]), rel=1e-6)
        assert found.marked == (bias > 0)


def written(params: SamplingParams, scale: float = 1.0) -> list[int]:
    """Tokens that a sampler draws from random logits. scale: their standard deviation; larger is more certain."""
    rows = np.random.default_rng(params.seed).normal(scale=scale, size=(params.max_tokens, VOCAB)).astype(np.float32)
    sampler = Sampler(params, [1, 2, 3, 4], VOCAB)
    return [sample.token_id for row in rows if (sample := sampler.sample(row)) is not None]


def test_gumbels_mark_is_found_with_its_key_only() -> None:
    mark = Watermark(77, "gumbel")
    tokens = written(SamplingParams(max_tokens=150, temperature=1.0, seed=3, watermark=mark))
    found = detect(tokens, mark, VOCAB)
    assert found.marked and found.p_value < 1e-6 and found.green is None and found.tokens == 150
    assert not detect(tokens, Watermark(78, "gumbel"), VOCAB).marked and not detect(tokens, Watermark(77), VOCAB).marked
    plain = written(SamplingParams(max_tokens=150, temperature=1.0, seed=3))
    assert not detect(plain, mark, VOCAB).marked and plain != tokens
    again = written(SamplingParams(max_tokens=150, temperature=1.0, seed=4, watermark=mark))
    assert again != tokens  # other logits; the same logits would give the same tokens, whatever the seed
    few = uniforms(77, (1, 2, 3, 4), VOCAB)
    assert few.min() > 0 and few.max() < 1 and abs(few.mean() - 0.5) < 0.1


def test_the_tail_of_a_sum_of_exponentials() -> None:
    assert gamma_tail(1, 2.0) == pytest.approx(math.exp(-2.0)) and gamma_tail(3, 0.0) == 1.0
    assert gamma_tail(3, 2.0) == pytest.approx(math.exp(-2.0) * (1 + 2 + 2))
    draws = np.random.default_rng(0).exponential(size=(20000, 50)).sum(axis=1)
    assert gamma_tail(50, 60.0) == pytest.approx((draws >= 60).mean(), abs=0.01)
    assert 0 < gamma_tail(1000, 2000.0) < 1e-100


# -- in a loop ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[FakeExecutor, FakeDevice])
def make_llm(request: Any, toy_manifest: Callable[..., Any], byte_tokenizer_file: Path) -> Callable[..., LLM]:
    """An LLM over a fake that samples on the host or on its device."""

    def make(drafter: Any = None) -> LLM:
        tokenizer = Tokenizer(byte_tokenizer_file.read_bytes())
        speculator = Speculator(drafter, adaptive=False) if drafter else None
        return LLM(toy_manifest(), request.param(vocab_size=VOCAB), tokenizer, speculator=speculator)

    return make


@pytest.mark.parametrize("method", ["kgw", "gumbel", "dual_key_gumbel", "synthid"])
@pytest.mark.parametrize("temperature", [0.0, 4.0])
def test_guesses_change_no_token_of_a_marked_text(
    make_llm: Callable[..., LLM], method: str, temperature: float
) -> None:
    """A guess is right if the marked sampler takes that token; other requests are not marked."""
    mark = SamplingParams(max_tokens=40, temperature=temperature, seed=1, watermark=MARKS[method])  # type: ignore[arg-type]
    plain = SamplingParams(max_tokens=40, temperature=temperature, seed=1)
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4]]
    alone = [make_llm().generate([prompt], one)[0] for prompt, one in zip(prompts, [mark, mark, plain], strict=True)]
    for llm in (make_llm(), guessing := make_llm(Oracle(0.8))):
        assert llm.generate(prompts, [mark, mark, plain]) == alone
    assert guessing.loop.speculator is not None and guessing.loop.speculator.counts.guesses
    # Gumbel's methods leave a greedy answer unmarked, and SynthID's changes no token that is nearly certain
    same = method != "kgw" and not temperature
    assert (alone[0].token_ids == alone[2].token_ids) == same


# -- how it is written -------------------------------------------------------------------------------------------------


def test_a_watermark_as_a_text(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("42\n")
    assert watermark("5") == Watermark(5) == watermark("kgw:5,bias=2,ratio=0.25")
    assert watermark(f"gumbel:@{tmp_path / 'key'}") == Watermark(42, "gumbel")
    assert SamplingParams(watermark="kgw:5").watermark == Watermark(5)  # type: ignore[arg-type]
    assert watermark("dual_key_gumbel:5,alpha=0.5") == Watermark(5, "dual_key_gumbel", alpha=0.5)
    (tmp_path / "keys").write_text("654, 400\n836\n")
    assert watermark(f"synthid:@{tmp_path / 'keys'}") == Watermark((654, 400, 836), "synthid")
    assert watermark("synthid:5") == Watermark(5, "synthid") and watermark(str(2**64 - 1)).keys == (2**64 - 1,)
    wrong = ["", "x", "kgw:", "other:5", "5,bias", "5,bias=x", "5,bias=21", "5,ratio=1", "0", "-1", str(2**64)]
    wrong += [
        "kgw:5+6",
        "kgw:5,alpha=0.1",
        "gumbel:5,bias=1",
        "synthid:5+",
        "synthid:0+1",
        "synthid:" + "+".join("1" * 65),
    ]
    for text in (*wrong, f"@{tmp_path}"):
        with pytest.raises(ValueError, match=r"must be|cannot be read|no number|takes one|no such option"):
            watermark(text)
    (tmp_path / "key").write_text("42secret")
    with pytest.raises(ValueError, match=r"key' is no number") as wrong_file:
        watermark(f"@{tmp_path / 'key'}")
    assert "secret" not in str(wrong_file.value)
    with pytest.raises(RequestError, match="watermark"):
        SamplingParams(watermark="nonsense")  # type: ignore[arg-type]


def test_commands_mark_and_tell(make_engine: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    root = str(make_engine(rule=1))
    common = ["run", root, "-p", "abcd", "--max-tokens", "60", "--temperature", "30", "--seed", "3", "--json"]
    texts = {}
    for name, options in {"marked": ["--watermark", "kgw:9,bias=8"], "plain": []}.items():
        assert main([*common, *options]) == 0
        found = json.loads(capsys.readouterr().out)
        texts[name] = found["text"]
    for name, marked in (("marked", True), ("plain", False)):
        text = texts[name]
        assert main(["detect", root, text, "--key", "kgw:9", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["marked"] == marked and found["tokens"] > 20 and (found["p_value"] < 1e-4) == marked
    assert main(["detect", texts["marked"], "--key", "kgw:9", "--engine", root]) == 0
    assert "marked with this key" in capsys.readouterr().out
    assert main(["detect", root, "a", "--key", "9", "--engine", root]) == main(["detect", "--key", "9"]) == 2
    assert capsys.readouterr().err.count("\n") == 3
    assert main(["detect", "--key", "9", texts["marked"]], engine=root) == 0
    shown = capsys.readouterr().out
    assert "z-score" in shown and "p-value" in shown and "marked with this key" in shown
    assert main(["detect", root, "a", "--key", "9"]) == RequestError.exit_code
    assert "at least 2 are needed" in capsys.readouterr().err
    assert main(["detect", root, "abc", "--key", "x"]) == 2
