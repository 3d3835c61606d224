"""An EAGLE-3 drafter on the CUDA executor over a fake driver: plain decoding's tokens, and the reference's guesses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from building import GpuEngine, build
from eagle_models import CASES, Reference, save_eagle, target_of
from fake_cuda import FakeDriver
from icc import SamplingParams
from icc.runtime.executor.cuda.device import CudaDevice
from icc.runtime.executor.cuda.driver import Cuda
from icc.runtime.executor.player import Player
from icc.runtime.format.manifest import Limits
from icc.runtime.llm import LLM
from icc.runtime.speculate.draft_layer import LayerDrafter
from icc.runtime.speculate.speculator import Speculator

pytestmark = pytest.mark.slow

LIMITS = Limits(max_seq_len=40, max_batch_size=3, max_step_tokens=20)
PROMPTS = [[5, 9, 5, 9, 5], [3, 4, 5, 6, 7, 8, 9, 3, 4, 5]]
PARAMS = [SamplingParams(max_tokens=4, temperature=t, seed=3, ignore_eos=True) for t in (1.0, 0.0)]


class Pair(NamedTuple):
    """An engine without compiled objects, and the reference for its drafter's guesses."""

    built: GpuEngine
    reference: Reference


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path: Path = tmp_path_factory.mktemp("eagle")
    drafter = CASES["specforge"]
    target = target_of(drafter, path / "model")
    save_eagle(drafter, target, path / "drafter")
    built = build(path / "model", "none", LIMITS, draft_layer=f"eagle:{path / 'drafter'}")
    return Pair(built, Reference(drafter, target, path / "drafter"))


def test_tokens_and_guesses(pair: Pair) -> None:
    """Sampled and greedy; guesses are computed in bf16, so some may differ from those in float32."""
    with pair.built.llm() as llm:
        plain = llm.generate(PROMPTS, PARAMS)
    driver, engine = FakeDriver(pair.built.objects()), pair.built.engine()
    executor: Any = Player(CudaDevice(engine, cuda=Cuda(bindings=driver)))
    drafter, seen = LayerDrafter(executor, [group.block_size for group in executor.groups], "eagle"), []
    propose, drafter.trees = drafter.propose, False

    def watched(wishes: Any) -> Any:
        found = propose(wishes)
        texts = {w.generation.request_id: [*w.generation.prompt, *w.generation.token_ids] for w in wishes}
        seen.extend((texts[i], list(proposal.draft.token_ids)) for i, proposal in found.items())
        return found

    drafter.propose = watched  # type: ignore[method-assign]
    speculator = Speculator(drafter, adaptive=False, max_guesses=3)
    faults: list[Exception] = []
    with LLM(pair.built.manifest, executor, speculator=speculator) as llm:
        llm.loop.on_fault = faults.append
        found = llm.generate(PROMPTS, PARAMS)
    if faults:
        raise faults[0]
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    same = [chain == pair.reference.chain(text, len(chain)) for text, chain in seen]
    assert len(same) >= 4 and sum(same) >= 0.7 * len(same), same
    assert not driver.live and not driver.memory
