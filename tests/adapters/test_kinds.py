"""All kinds of adapters at run time: the numbers of transformers and peft, over quantized and unquantized bases."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
from icc import SamplingParams
from icc.runtime.errors import RequestError
from icc.runtime.query import Query
from peft_models import adapted_logits, save_adapter, save_dequantized
from sizes import soak, usual

IDS = [5, 9, 33, 70, 2, 8, 14, 55, 101, 7, 5, 90]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GPT2: dict[str, Any] = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True, "r": 4}
LINEAR: dict[str, Any] = {"target_modules": PROJECTIONS, "r": 4}
Make = Callable[..., Path]
ROOM = {
    "llama": "4x16+dora:all-linear,lm_head,embed_tokens",
    "gemma3": "4x16+dora:all-linear,lm_head,embed_tokens",
    "gpt2": "4x16+dora:all-linear,lm_head,wte",
    "qwen2": "4x16+dora",
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", LINEAR),
    "biases": ("llama", {**LINEAR, "lora_bias": True}),
    "biases beside biases": ("gpt2", {**GPT2, "lora_bias": True}),
    "biases of gemma": ("gemma3", {**LINEAR, "lora_bias": True}),
    "table and head": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "r": 4}),
    "table": ("llama", {"target_modules": ["embed_tokens"], "r": 8, "use_rslora": True}),
    "a scaled table that is tied": ("gemma3", {"target_modules": ["embed_tokens", "v_proj"], "r": 4}),
    "a head that is tied": ("gemma3", {"target_modules": ["lm_head"], "r": 4}),
    "table and head that are tied": ("gpt2", {**GPT2, "target_modules": ["wte", "c_attn", "lm_head"]}),
    "the model's biases": ("qwen2", {"target_modules": ["q_proj"], "r": 4, "bias": "all"}),
    "dora": ("llama", {**LINEAR, "use_dora": True}),
    "dora of gemma": ("gemma3", {**LINEAR, "use_dora": True}),
    "dora of conv1d with biases": ("gpt2", {**GPT2, "use_dora": True}),
    "dora beside biases": ("qwen2", {"target_modules": ["q_proj", "v_proj", "up_proj"], "r": 4, "use_dora": True}),
    "tokens": ("llama", {"target_modules": ["q_proj"], "r": 4, "trainable_token_indices": [5, 101]}),
    "tokens of a tied table": (
        "gemma3", {"target_modules": ["q_proj"], "r": 4, "trainable_token_indices": {"embed_tokens": [5, 101]}},
    ),
    "tokens of gpt2": ("gpt2", {**GPT2, "trainable_token_indices": {"wte": [5, 101, 7]}}),
}  # fmt: skip


QUANTIZED = (
    "table and head", "dora", "tokens",
    *soak("dora of gemma", "tokens of a tied table"),
    *soak("biases of gemma", "biases beside biases", "dora of conv1d with biases"),
)  # fmt: skip
SCORED = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def difference(expected: Any, found: np.ndarray) -> float:
    wanted = np.asarray(expected)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("case", usual(CASES, "biases of gemma", "the model's biases", "dora beside biases"))
def test_numbers_are_those_of_peft(case: str, engine: Make, model: Callable[[str], Path], tmp_path: Path) -> None:
    family, options = CASES[case]
    path = save_adapter(model(family), tmp_path / "adapter", **options)
    with icc.load(engine(family, adapters=ROOM[family])) as llm:
        base = llm.logits(IDS)
        llm.load_adapter("own", path)
        expected = adapted_logits(model(family), path, IDS)
        assert difference(expected, llm.logits(IDS, adapter="own")) < 2e-5
        assert difference(expected, base) > 1e-3
        assert np.array_equal(llm.logits(IDS), base)


@pytest.mark.parametrize("case", QUANTIZED)
def test_over_a_base_of_8_bits(case: str, engine: Make, model: Callable[[str], Path], tmp_path: Path) -> None:
    """The logits are those of peft over the dequantized base, as products with 8-bit floats take float32 rows."""
    family, options = CASES[case]
    base = save_dequantized(model(family), tmp_path / "base", "fp8")
    path = save_adapter(base, tmp_path / "adapter", **options)
    with icc.load(engine(family, adapters=ROOM[family], quant="fp8", quant_head="none")) as llm:
        llm.load_adapter("own", path)
        assert difference(adapted_logits(base, path, IDS), llm.logits(IDS, adapter="own")) < 2e-5


def test_over_a_base_of_4_bits(engine: Make, model: Callable[[str], Path], tmp_path: Path) -> None:
    """The only difference is that the products round their rows to 8 bits."""
    base = save_dequantized(model("llama"), tmp_path / "base", "rtn4")
    with icc.load(engine("llama", adapters=ROOM["llama"], quant="rtn4", quant_head="none")) as llm:
        for case in ("biases", "dora", "table and head", "tokens"):
            path = save_adapter(base, tmp_path / case, **CASES[case][1])
            llm.load_adapter("own", path)
            expected = adapted_logits(base, path, IDS)
            assert difference(expected, llm.logits(IDS, adapter="own")) < 0.1
            assert difference(expected, llm.logits(IDS)) > 0.3


def test_a_mixed_batch_is_each_alone_bit_for_bit(engine: Make, model: Callable[[str], Path], tmp_path: Path) -> None:
    names: list[str | None] = [None, "biases", "dora", "table and head", "tokens", "dora", None, "biases"]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=3)
    prompts = [IDS[i : i + 6] for i in range(len(names))]
    with icc.load(engine("llama", adapters=ROOM["llama"])) as llm, icc.load(engine("llama")) as plain:
        for name in filter(None, dict.fromkeys(names)):
            llm.load_adapter(name, save_adapter(model("llama"), tmp_path / name, size=0.2, **CASES[name][1]))
        together = llm.generate(prompts, params, adapter=names)
        for prompt, name, found in zip(prompts, names, together, strict=True):
            [alone] = llm.generate([prompt], params, adapter=name) if name else plain.generate([prompt], params)
            assert (found.token_ids, found.logprobs) == (alone.token_ids, alone.logprobs)
        told = {tuple(one.token_ids) for one in llm.generate([IDS] * 5, params, adapter=list(dict.fromkeys(names)))}
        assert len(told) > 2


def test_a_scale_of_magnitudes_is_peft_s(engine: Make, model: Callable[[str], Path], tmp_path: Path) -> None:
    """A request's scale multiplies B A; the norms of the rows are computed from the result."""
    path = save_adapter(model("llama"), tmp_path / "dora", **CASES["dora"][1])
    other = tmp_path / "half"
    shutil.copytree(path, other)
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] / 2}))
    with icc.load(engine("llama", adapters=ROOM["llama"])) as llm:
        llm.load_adapter("own", path)
        task = llm.submit(Query(IDS, SCORED, adapter="own", adapter_scale=0.5))
        while not task.done:
            llm.driver.step()
        llm.load_adapter("half", other)
        assert list(task.generations[0].token_ids) == list(llm.generate([IDS], SCORED, adapter="half")[0].token_ids)


def test_a_whole_weight_of_no_more_rows_than_the_rank(
    engine: Make, model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each row is a change of rank 1. If the engine's rank is too small, the refusal states the rank that would do."""
    options = {"target_modules": ["q_proj"], "r": 4, "modules_to_save": ["k_proj"]}
    path = save_adapter(model("llama"), tmp_path / "adapter", **options)
    with icc.load(engine("llama", adapters="2x32:q_proj,k_proj")) as llm:
        base = llm.logits(IDS)
        llm.load_adapter("own", path)
        expected = adapted_logits(model("llama"), path, IDS)
        assert difference(expected, llm.logits(IDS, adapter="own")) < 2e-5
        assert difference(expected, base) > 1e-3
    with icc.load(engine("llama", adapters=ROOM["llama"])) as llm, pytest.raises(RequestError) as refused:
        llm.load_adapter("own", path)
    assert refused.value.hint == (
        "merge it when the model is compiled (--lora), or compile with room for rank 32, which is one for each of its "
        "rows (--adapters)"
    )


def test_what_is_refused(engine: Make, model: Callable[[str], Path], tmp_path: Path) -> None:
    """The refusal names the key, and what would help."""

    def refused(family: str, match: str, room: str, quant: str = "none", **config: Any) -> None:
        path = save_adapter(model(family), tmp_path / f"refused{len(list(tmp_path.iterdir()))}", **config)
        with icc.load(engine(family, adapters=room, quant=quant)) as llm, pytest.raises(RequestError, match=match):
            llm.load_adapter("refused", path)

    q, r = {"target_modules": ["q_proj"], "r": 4}, ROOM["llama"]
    refused(
        "llama", r"k_proj.weight: the engine cannot compute with a whole weight", r, **q, modules_to_save=["k_proj"]
    )
    refused("llama", r"lm_head.weight: the engine cannot compute with a whole", r, **q, modules_to_save=["lm_head"])
    refused("llama", r"one for each trained token, is 17", r, **q, trainable_token_indices=[*range(20, 37)])
    refused("llama", r"lm_head.weight: the engine has no room for a magnitude", r, target_modules=["lm_head"], r=4,
            use_dora=True)  # fmt: skip
