"""Adapters at run time: the numbers of transformers and peft, and no influence of one request's adapter on another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import icc
import msgspec
import numpy as np
import pytest
from icc import SamplingParams
from icc.compiler.options import CompileOptions
from icc.compiler.packing import pack_engine
from icc.compiler.planning.plan import make_plan
from icc.compiler.planning.show import as_text
from icc.runtime.commands.memory import certify
from icc.runtime.errors import RequestError, UsageError
from icc.runtime.format.adapters import ADAPTER_SECTION
from icc.runtime.format.files import EngineFiles
from icc.runtime.format.folder import Folder
from icc.runtime.format.footprint import size_text
from icc.runtime.format.load import read_manifest
from icc.runtime.format.programs import read_program
from icc.runtime.llm import LLM
from icc.runtime.query import Query
from peft_models import adapted_logits, save_adapter
from sizes import usual

IDS = [5, 9, 33, 70, 2, 8, 14, 55, 101, 7, 7, 90]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
Make = Callable[..., Path]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "target_modules": PROJECTIONS},
    "rslora": {"r": 8, "lora_alpha": 3, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "patterns": {
        "r": 4,
        "target_modules": PROJECTIONS,
        "rank_pattern": {r"layers\.0\..*q_proj": 16, "up_proj": 2},
        "alpha_pattern": {"v_proj": 1, "1.self_attn.o_proj": 32},
    },
}


@pytest.fixture(scope="module")
def adapters(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(model("llama"), folder / name, seed, **kind)
        for seed, (name, kind) in enumerate(KINDS.items())
    }


@pytest.fixture
def llm(engine: Make, adapters: dict[str, Path]) -> Iterator[LLM]:
    """An engine with two slots, for three adapters."""
    with icc.load(engine("llama", adapters="2x16")) as found:
        for name, path in adapters.items():
            found.load_adapter(name, path)
        yield found


def difference(expected: Any, found: np.ndarray) -> float:
    wanted = np.asarray(expected)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def test_numbers_are_those_of_peft(llm: LLM, model: Callable[[str], Path], adapters: dict[str, Path]) -> None:
    base = llm.logits(IDS)
    for name, path in adapters.items():
        expected = adapted_logits(model("llama"), path, IDS)
        assert difference(expected, llm.logits(IDS, adapter=name)) < 2e-5, name
        assert difference(expected, base) > 1e-3, name


FAMILIES = {
    "gpt2": {"r": 4, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "qwen3_moe": {
        "r": 4, "target_modules": ["q_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "gemma3": {"r": 4, "target_modules": PROJECTIONS},
    "lfm2-short_convolutions": {"r": 4, "target_modules": ["in_proj", "out_proj", "w1", "w2", "q_proj"]},
}  # fmt: skip
ROOM = {"qwen3_moe": "2x16:q_proj,o_proj,experts.*"}


# gemma3 and gpt2 are in test_kinds.py
@pytest.mark.parametrize("family", usual(FAMILIES, "lfm2-short_convolutions", "gemma3", "gpt2"))
def test_families(family: str, engine: Make, model: Callable[[str], Path], tmp_path: Path) -> None:
    path = save_adapter(model(family), tmp_path / "adapter", **FAMILIES[family])
    with icc.load(engine(family, adapters=ROOM.get(family, "2x16"))) as llm:
        llm.load_adapter("own", path)
        expected = adapted_logits(model(family), path, IDS)
        assert difference(expected, llm.logits(IDS, adapter="own")) < 2e-5
        assert difference(expected, llm.logits(IDS)) > 1e-3


def test_the_base_pays_nothing(engine: Make, llm: LLM) -> None:
    """An engine with adapter slots has the same steps and gives the same bits as one without, if no adapter is used."""
    with icc.load(engine("llama")) as plain:
        assert np.array_equal(plain.logits(IDS), llm.logits(IDS))
        assert plain.engine is not None and llm.engine is not None
        without, with_room = (one.engine.files.read("program.json") for one in (plain, llm))
    steps = [msgspec.json.decode(raw)["steps"] for raw in (without, with_room)]
    assert llm.engine.program.num_own_steps == len(steps[0])
    assert steps[1][: len(steps[0])] == steps[0]


def test_what_adapters_add_to_the_steps(llm: LLM) -> None:
    """One product with A for each value that layers read: for q, k and v; o; gate and up; down. The products of the
    layers add B's: more steps would mean more barriers of all threads."""
    assert llm.engine is not None
    program = llm.engine.program
    [section] = (one for one in program.sections if one.name == ADAPTER_SECTION)
    layers = len(program.kv.groups[0].layers)
    assert section.end - section.begin == program.num_own_steps + 4 * layers


def test_an_engine_of_one_file_has_room(engine: Make, llm: LLM, adapters: dict[str, Path], tmp_path: Path) -> None:
    pack_engine(engine("llama", adapters="2x16"), tmp_path / "one.icc")
    with icc.load(tmp_path / "one.icc") as found:
        found.load_adapter("plain", adapters["plain"])
        answers = [one.generate([IDS], PARAMS, adapter="plain")[0].token_ids for one in (found, llm)]
    assert answers[0] == answers[1]


def test_a_mixed_batch_is_each_alone_bit_for_bit(llm: LLM) -> None:
    prompts = [IDS[i : i + 6] for i in range(7)]
    names = [None, "plain", "rslora", "patterns", "plain", None, "patterns"]
    scored = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=3)
    together = llm.generate(prompts, scored, adapter=names)
    for prompt, name, found in zip(prompts, names, together, strict=True):
        [alone] = llm.generate([prompt], scored, adapter=name)
        assert (found.token_ids, found.logprobs) == (alone.token_ids, alone.logprobs)
    assert len({tuple(one.token_ids) for one in llm.generate([IDS] * 4, PARAMS, adapter=[None, *KINDS])}) > 1


def test_no_cached_block_crosses(llm: LLM) -> None:
    """One prompt, run with one adapter after another in the same slots."""
    prompt = (IDS * 4)[:40]
    expected = {name: llm.generate([prompt], PARAMS, adapter=name)[0] for name in (None, *KINDS)}
    for name in ("plain", None, "rslora", "patterns", "plain", "rslora", None):
        task = llm.submit(Query(prompt, PARAMS, adapter=name or ""))
        while not task.done:
            llm.driver.step()
        [found] = task.generations
        assert found.num_cached_tokens == 32  # its own block, from before
        assert found.completion().token_ids == expected[name].token_ids


def test_a_replaced_adapter_counts_for_new_requests(llm: LLM, adapters: dict[str, Path]) -> None:
    [before] = llm.generate([IDS], PARAMS, adapter="plain")
    [other] = llm.generate([IDS], PARAMS, adapter="patterns")
    stream = llm.stream(IDS, PARAMS, adapter="plain")
    tokens = list(next(stream).token_ids)
    llm.load_adapter("plain", adapters["patterns"])
    [new] = llm.generate([IDS], PARAMS, adapter="plain")
    for increment in stream:
        tokens += increment.token_ids
    assert tuple(tokens) == tuple(before.token_ids)
    assert new.token_ids == other.token_ids
    llm.unload_adapter("plain")
    with pytest.raises(RequestError, match="there is no adapter 'plain': there are rslora, patterns"):
        llm.generate([IDS], PARAMS, adapter="plain")


def test_an_alora_counts_from_its_invocation(engine: Make, model: Callable[[str], Path], tmp_path: Path) -> None:
    invocation = IDS[6:8]
    options = {"r": 4, "target_modules": PROJECTIONS, "alora_invocation_tokens": invocation, "task_type": "CAUSAL_LM"}
    path = save_adapter(model("llama"), tmp_path / "alora", **options)
    with icc.load(engine("llama", adapters="2x16")) as llm:
        llm.load_adapter("alora", path)
        base, found = llm.logits(IDS), llm.logits(IDS, adapter="alora")
        assert np.array_equal(found[:6], base[:6]) and difference(base[6:], found[6:]) > 1e-3
        assert difference(adapted_logits(model("llama"), path, IDS), found) < 2e-5


def test_an_alora_shares_the_bases_blocks_up_to_its_invocation(
    engine: Make, model: Callable[[str], Path], tmp_path: Path
) -> None:
    """The base and aLoRAs share blocks before the invocation, in both directions; later blocks are not shared. A block
    has 32 tokens."""
    first, second = (3, 4), (5, 6)
    beginning = [7 + i % 90 for i in range(45)]  # the invocation is in the second block
    options = {"r": 4, "target_modules": PROJECTIONS, "task_type": "CAUSAL_LM"}
    paths = [
        save_adapter(model("llama"), tmp_path / str(n), n, alora_invocation_tokens=[*tokens], **options)
        for n, tokens in enumerate((first, second))
    ]
    prompts = {name: [*beginning, *tokens, *range(30, 50)] for name, tokens in (("a", first), ("b", second))}

    def cached(llm: LLM, prompt: list[int], name: str) -> tuple[int, list[int]]:
        task = llm.submit(Query(prompt, SamplingParams(max_tokens=4, temperature=0.0), adapter=name))
        while not task.done:
            llm.driver.step()
        return task.generations[0].num_cached_tokens, list(task.generations[0].token_ids)

    with icc.load(engine("llama", adapters="2x16", max_seq_len=96)) as llm:
        for name, path in zip(prompts, paths, strict=True):
            llm.load_adapter(name, path)
        fresh = {}
        for name, prompt in prompts.items():
            for used in (name, ""):
                with icc.load(engine("llama", adapters="2x16", max_seq_len=96)) as alone:
                    alone.load_adapter(name, paths[[*prompts].index(name)])
                    fresh[name, used] = cached(alone, prompt, used)[1]
        expected = [("a", "a", 0), ("a", "", 32), ("b", "b", 32), ("a", "a", 64), ("b", "", 32), ("a", "", 64)]
        for name, used, count in expected:
            found = cached(llm, prompts[name], used)
            assert found == (count, fresh[name, used]), (name, used, found)


def test_vectors(engine: Make, model: Callable[[str], Path], adapters: dict[str, Path]) -> None:
    """The vectors of an engine that embeds are computed from the model's hidden states with the adapter."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with icc.load(engine("llama", adapters="2x16", task="embed", pooling="mean")) as llm:
        llm.load_adapter("plain", adapters["plain"])
        found = llm.embed([IDS, IDS], adapter=["plain", None])
    base = AutoModelForCausalLM.from_pretrained(model("llama"), dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, adapters["plain"]).eval()
    with torch.no_grad():
        states = adapted(input_ids=torch.tensor([IDS]), output_hidden_states=True).hidden_states[-1][0].mean(0)
    assert difference(states / states.norm(), found[0]) < 2e-5
    assert difference(found[1], found[0]) > 1e-3


def test_options_that_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--adapters and --rotate"):
        CompileOptions(model=tmp_path, output=tmp_path, adapters="2x8", rotate=True, quant="rtn4")


def test_what_has_no_room(engine: Make, model: Callable[[str], Path], llm: LLM, tmp_path: Path) -> None:
    def refused(match: str, **config: Any) -> None:
        path = save_adapter(model("llama"), tmp_path / f"refused{len(list(tmp_path.iterdir()))}", **config)
        with pytest.raises(RequestError, match=match):
            llm.load_adapter("refused", path)

    refused("q_proj.weight: its rank is 32, the engine has room for 16", r=32, target_modules=["q_proj"])
    refused("lm_head.weight: the engine has no room for adapters there", r=4, target_modules=["lm_head"])
    refused(r"no room for a magnitude per row \(DoRA\)", r=4, target_modules=["q_proj"], use_dora=True)
    refused("cannot compute with a whole weight", r=4, target_modules=["q_proj"], modules_to_save=["k_proj"])
    refused("embed_tokens.weight: the engine has no room", r=4, target_modules=["q_proj"], trainable_token_indices=[5])
    assert "refused" not in llm.adapters.names  # type: ignore[union-attr]
    with icc.load(engine("llama")) as plain, pytest.raises(RequestError, match="no room for adapters"):
        plain.load_adapter("any", tmp_path)
    with pytest.raises(RequestError, match="2 adapters for 1 prompts"):
        llm.generate([IDS], PARAMS, adapter=["plain", "plain"])


def test_memory_counts_the_room(engine: Make, model: Callable[[str], Path]) -> None:
    """The adapter pools have a row of their own, for an engine and for a planned one."""
    path = engine("llama", adapters="2x16")
    program = read_program(read_manifest(path), EngineFiles(Folder(path), read_manifest(path).files, verify=False))
    pools = sum(weight.nbytes for name, weight in program.weights.items() if name not in program.stored)
    with_room, without = certify(path), certify(engine("llama"))
    assert with_room["adapters_bytes"] == pools > 0 and "adapters_bytes" not in without
    assert with_room["total_bytes"] - without["total_bytes"] > 0.9 * pools  # type: ignore[operator]
    options = CompileOptions(model=model("llama"), output=Path(), target="native", max_seq_len=64, adapters="2x16")
    plan = make_plan(options, ["native"])
    assert plan.targets[0].planned.memory.adapters == pools
    [row] = [line.split() for line in as_text(plan).splitlines() if line.startswith("adapters")]
    assert row == ["adapters", *size_text(pools).split()]


def test_ranks_from_8_to_256(engine: Make, model: Callable[[str], Path], tmp_path: Path) -> None:
    """The largest rank and a small one in one batch: each row has the numbers of peft."""
    ranks = (8, 256)
    folders = [save_adapter(model("llama"), tmp_path / str(r), r, 0.1, r=r, target_modules=PROJECTIONS) for r in ranks]
    with icc.load(engine("llama", adapters="2x256")) as llm:
        for rank, folder in zip(ranks, folders, strict=True):
            llm.load_adapter(str(rank), folder)
        together = llm.generate([IDS] * 2, PARAMS, adapter=[str(rank) for rank in ranks])
        for rank, folder, mixed in zip(ranks, folders, together, strict=True):
            assert difference(adapted_logits(model("llama"), folder, IDS), llm.logits(IDS, adapter=str(rank))) < 2e-5
            assert llm.generate([IDS], PARAMS, adapter=str(rank))[0].token_ids == mixed.token_ids
