"""A DFlash drafter on the CUDA executor over a fake driver: plain tokens, and the guesses of published code."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import dflash_models
import pytest
from building import GpuEngine, build
from eagle_models import CASES, target_of
from fake_cuda import FakeDriver
from icc import SamplingParams
from icc.runtime.executor.cuda.device import CudaDevice
from icc.runtime.executor.cuda.driver import Cuda
from icc.runtime.executor.player import Player
from icc.runtime.format.manifest import Limits
from icc.runtime.llm import LLM
from icc.runtime.speculate.draft_block import BlockDrafter
from icc.runtime.speculate.speculator import Speculator

pytestmark = pytest.mark.slow

LIMITS = Limits(max_seq_len=40, max_batch_size=3, max_step_tokens=20)
PROMPTS = [[5, 9, 5, 9, 5], [3, 4, 5, 6, 7, 8, 9, 3, 4, 5]]
PARAMS = [SamplingParams(max_tokens=4, temperature=t, seed=3, ignore_eos=True) for t in (1.0, 0.0)]


class Pair(NamedTuple):
    """An engine without compiled objects, and the reference for its drafter's guesses."""

    built: GpuEngine
    reference: dflash_models.Reference


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path: Path = tmp_path_factory.mktemp("dflash")
    target, case = target_of(CASES["specforge"], path / "model"), dflash_models.CASES["zlab"]
    target = dflash_models.without_mask(target, path / "model")
    dflash_models.save_dflash(case, target, path / "drafter")
    built = build(path / "model", "none", LIMITS, draft_layer=f"dflash:{path / 'drafter'}")
    return Pair(built, dflash_models.Reference(case, target, path / "drafter"))


def test_tokens_and_guesses(pair: Pair) -> None:
    """Sampled and greedy; guesses are computed in bf16, so some may differ from those in float32."""
    with pair.built.llm() as llm:
        plain = llm.generate(PROMPTS, PARAMS)
    driver, engine = FakeDriver(pair.built.objects()), pair.built.engine()
    executor: Any = Player(CudaDevice(engine, cuda=Cuda(bindings=driver)))
    sizes, seen = [group.block_size for group in executor.groups], []
    drafter: Any = BlockDrafter(executor, sizes, "dflash", dflash_models.BLOCK, dflash_models.MASK, LIMITS.max_seq_len)
    propose = drafter.propose

    def watched(wishes: Any) -> Any:
        found = propose(wishes)
        texts = {w.generation.request_id: [*w.generation.prompt, *w.generation.token_ids] for w in wishes}
        seen.extend((texts[i], list(proposal.draft.token_ids)) for i, proposal in found.items())
        return found

    drafter.propose = watched
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
