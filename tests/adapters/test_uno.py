"""`--spec uno:DIR`: the model guesses for itself, with an adapter in the rows of noise alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import pytest
import torch
from icc import SamplingParams
from icc.runtime.batch.scheduled import ScheduledBatch, ScheduledSequence
from icc.runtime.errors import RequestError, UsageError
from icc.runtime.executor.base import Executor
from icc.runtime.executor.sampling import greedy_tokens
from icc.runtime.format.adapters import ADAPTER
from icc.runtime.llm import LLM
from icc.runtime.speculate import uno
from peft_models import save_adapter
from safetensors.torch import load_file

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [[1, 5, 9, 5, 9, 5], [1, 7], [1, *range(10, 30)], [1, *range(10, 30)], [3, 4, 3, 4, 3, 4, 3]]
NAMES = ["one", None, "two", None, "one"]
ALPHA, RANK = 8, 4
Make = Callable[..., Path]
Step = list[tuple[ScheduledSequence, list[int]]]


@pytest.fixture(scope="module")
def adapters(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of the tiny llama and gemma 3: `uno` and, of llama, two for requests."""
    folder = tmp_path_factory.mktemp("adapters")
    kind = {"r": RANK, "lora_alpha": ALPHA, "target_modules": PROJECTIONS}
    llama = {n: save_adapter(model("llama"), folder / n, i, 0.1, **kind) for i, n in enumerate(("one", "two", "uno"))}
    return {**llama, "gemma3": save_adapter(model("gemma3"), folder / "gemma3", 3, 0.1, **kind)}


def answers(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    if llm.loop.speculator is not None:
        llm.loop.speculator.adaptive = False  # guess at every step, even if it does not pay
    return [list(one.token_ids) for one in llm.generate(PROMPTS, params)]


class Reference:
    """The model in transformers, with the adapter's matrices in the rows of noise alone."""

    def __init__(self, model: Path, adapter: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._scales = torch.zeros(0)
        tensors = load_file(adapter / "adapter_model.safetensors")
        for name, module in self._model.named_modules():
            key = f"base_model.model.{name}.lora_A.weight"
            if key in tensors:
                module.register_forward_hook(self._hook(tensors[key], tensors[key.replace("lora_A", "lora_B")]))

    def _hook(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        return lambda module, args, output: output + self._scales * (args[0] @ a.T @ b.T)

    def guesses(self, text: list[int], noise: list[int]) -> list[int]:
        """The likeliest token after the last token of the text, and after each token of noise behind it."""
        self._scales = torch.tensor([0.0] * len(text) + [ALPHA / RANK] * len(noise))[:, None]
        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([[*text, *noise]])).logits[0]
        return logits[len(text) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_guesses_are_those_of_transformers(
    engine: Make, model: Callable[[str], Path], adapters: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first guess is always right. Windows and rows at several positions of a KV block are among the steps."""
    steps: Step = []

    def recorded(executor: Executor, batch: ScheduledBatch) -> list[int]:
        tokens = greedy_tokens(executor, batch)
        rest = iter(tokens)
        steps.extend((part, [next(rest) for _ in part.token_ids]) for part in batch.sequences)
        return tokens

    monkeypatch.setattr(uno, "greedy_tokens", recorded)
    adapter = adapters["uno" if kind == "llama" else kind]
    with icc.load(engine(kind, adapters="2x16"), spec="none") as llm:
        plain = answers(llm)
    with icc.load(engine(kind, adapters="2x16"), spec=f"uno:{adapter}") as llm:
        assert answers(llm) == plain
        counts = llm.loop.speculator.counts  # type: ignore[union-attr]
    assert counts.accepted >= counts.drafts > 20
    assert {len(guesses) for _, guesses in steps} >= {2, uno.BLOCK}
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, plain, strict=True)]
    reference = Reference(model(kind), adapter)
    for part, guesses in steps:
        newest, *noise = part.token_ids
        texts_so_far = [text[: part.start + 1] for text in texts if text[part.start : part.start + 1] == [newest]]
        assert guesses in [reference.guesses(text, noise) for text in texts_so_far]


def test_answers_are_those_without_guesses(engine: Make, adapters: dict[str, Path]) -> None:
    """Greedy and sampled ones, several of a prompt, with a prefix from the cache, and with adapters of requests."""
    sampled = SamplingParams(max_tokens=16, temperature=0.8, seed=3, n=2, ignore_eos=True)
    found: list[list[list[int]]] = []
    for spec in ("none", f"uno:{adapters['uno']}"):
        with icc.load(engine("llama", adapters="2x16"), spec=spec) as llm:
            for name in ("one", "two"):
                llm.load_adapter(name, adapters[name])
            found.append([*answers(llm), *answers(llm), *answers(llm, sampled)])
            found[-1] += [list(one.token_ids) for one in llm.generate(PROMPTS, GREEDY, adapter=NAMES)]
            if spec != "none":
                assert llm.loop.speculator is not None and llm.loop.speculator.counts.accepted > 60
                assert llm.adapters is not None and sorted(llm.adapters.names) == ["one", "two"]
    assert found[0] == found[1]


def test_the_newest_token_runs_with_the_requests_adapter(engine: Make, adapters: dict[str, Path]) -> None:
    """So that the first guess is right for it, too."""
    with icc.load(engine("llama", adapters="2x16"), spec=f"uno:{adapters['uno']}") as llm:
        llm.load_adapter("one", adapters["one"])
        assert llm.loop.speculator is not None
        llm.loop.speculator.adaptive = False
        llm.generate(PROMPTS[:2], GREEDY, adapter="one")
        counts = llm.loop.speculator.counts
        assert counts.accepted >= counts.drafts > 10


def test_its_adapter_keeps_its_slot(engine: Make, adapters: dict[str, Path]) -> None:
    """Requests take turns in the other slots. If there are none, their adapters are refused."""
    with icc.load(engine("llama", adapters="2x16"), spec=f"uno:{adapters['uno']}") as llm:
        for name in ("one", "two"):
            llm.load_adapter(name, adapters[name])
        for name in ("one", "two", "one"):
            llm.generate(PROMPTS[:1], GREEDY, adapter=name)
        with pytest.raises(RequestError, match="there is no adapter 'of --spec uno'"):
            llm.generate(PROMPTS[:1], GREEDY, adapter="of --spec uno")
    with icc.load(engine("llama", adapters="1x16"), spec=f"uno:{adapters['uno']}") as llm:
        with pytest.raises(RequestError, match="drafter's adapter takes all of the engine's room"):
            llm.load_adapter("one", adapters["one"])
        assert llm.loop.speculator is not None
        llm.loop.speculator.drafter.close()
        llm.load_adapter("one", adapters["one"])
        llm.generate(PROMPTS[:1], GREEDY, adapter="one")


def test_rows_name_the_slot_of_the_noise(adapters: dict[str, Path], engine: Make) -> None:
    with icc.load(engine("llama", adapters="2x16"), spec=f"uno:{adapters['uno']}") as llm:
        drafter = llm.loop.speculator.drafter  # type: ignore[union-attr]
        assert isinstance(drafter, uno.UnoDrafter)
        given = drafter._extras({"token_types": b"123"}, 5, 3)
        assert given["token_types"] == b"123"
        rows = given[ADAPTER.name][20:32]
        assert rows == b"\xff\xff\xff\xff" + 2 * drafter._slot.to_bytes(4, "little")


def test_refused_in_words(
    engine: Make, model: Callable[[str], Path], adapters: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="the engine has no room for adapters"):
        icc.load(engine("llama"), spec=f"uno:{adapters['uno']}")
    with pytest.raises(icc.IccError, match="is no directory with an adapter"):
        icc.load(engine("llama", adapters="2x16"), spec=f"uno:{tmp_path / 'none'}")
    large = save_adapter(model("llama"), tmp_path / "large", r=32, target_modules=PROJECTIONS)
    with pytest.raises(RequestError, match=r"adapter of --spec uno \(.*large\): .* rank"):
        icc.load(engine("llama", adapters="2x16"), spec=f"uno:{large}")
    with pytest.raises(UsageError, match="--spec 'uno' is unknown"):
        icc.load(engine("llama", adapters="2x16"), spec="uno:")
