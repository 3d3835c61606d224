"""--spec mtp: the layer of a checkpoint that predicts the token after the next one makes the guesses of published code,
and changes no token."""

from __future__ import annotations

import shutil
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import icc
import pytest
import torch
from guessing import PARAMS, PROMPTS, always, check_chains, check_ranks, check_tokens, compiled_once, without_guesses
from icc.compiler.errors import UsageError
from icc.compiler.frontend.load import load_graph
from icc.compiler.measure.prompts import compute_prompts
from icc.runtime.commands.inspect import describe_engine
from icc.runtime.format.load import open_engine
from icc.runtime.format.prompts import CompiledPrompt
from icc.runtime.kv.sequence import CachedSequence
from icc.runtime.loading import load
from icc.runtime.prefixes.blocks import KVBlocks, digest_of
from mtp_models import LAYOUTS, WithLayer, layouts, reference, save_with_mtp
from sizes import soak

pytestmark = pytest.mark.slow

LATENT, HYBRID = "deepseek_v3-latent_grouped_routing", "qwen3_next-delta_rule"
OF_ITS_OWN = (HYBRID, "qwen3_5", "qwen3_5_moe")  # checkpoints that have it under `mtp.`


class Pair(NamedTuple):
    """An engine compiled with the layer, and its sources."""

    engine: Path
    own: WithLayer

    @property
    def checkpoint(self) -> Path:
        return self.own.checkpoint

    @property
    def oracle(self) -> Any:
        return self.own.oracle


@pytest.fixture(scope="module", params=[LATENT, HYBRID, *soak(*LAYOUTS)])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Pair:
    path = tmp_path_factory.mktemp("mtp") / "model"
    own = save_with_mtp((tiny.tiny_configs() | layouts())[request.param], path, own=request.param in OF_ITS_OWN)
    engine = compiled_once(f"mtp-{request.param}", path, "mtp")
    return Pair(engine, own)


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[Any]:
    return without_guesses(pair.engine)


def test_tokens_are_those_without_it(pair: Pair, plain: list[Any]) -> None:
    """Greedy and sampled tokens."""
    check_tokens(pair.engine, "mtp", plain)


@pytest.mark.parametrize("option", ["tensor_parallel", "expert_parallel"])
def test_it_guesses_for_ranks(option: str, pair: Pair, plain: list[Any]) -> None:
    if option == "expert_parallel" and not any(".experts." in name for name in pair.oracle.state_dict()):
        pytest.skip("a model without experts does not divide so")
    check_ranks(pair.engine.stem, pair.checkpoint, "mtp", plain, **{option: 2})


def test_guesses_are_those_of_the_published_code(pair: Pair) -> None:
    check_chains(pair.engine, "mtp", partial(reference, pair.own))


def test_transformers_own_layer_guesses_the_same(pair: Pair) -> None:
    """The guesses of `generate(use_mtp=True)`, for families whose layer transformers has."""
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    config = pair.oracle.config
    if getattr(config, "num_mtp_layers", None) is None:
        pytest.skip("transformers drops the layer of this family")
    config.name_or_path, config.dtype = str(pair.checkpoint), torch.float32
    # the class names the layer number of the published model
    pair.oracle._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{config.num_hidden_layers}\..*"]
    theirs = MtpModel.from_pretrained(pair.oracle).float()
    for text in PROMPTS:
        ids, places = torch.tensor([text]), torch.arange(len(text))[None]
        with torch.no_grad():
            hidden = pair.oracle.model(input_ids=ids, use_cache=False).last_hidden_state
            cache = MtpCache(config=config.get_mtp_config())
            guess, _, _ = theirs(ids[:, 1:], hidden[:, :-1], None, places[:, 1:], cache)
        assert guess.tolist() == [reference(pair.own, text, 1)]


def test_what_the_engine_says_of_it(pair: Pair) -> None:
    """The engine has the layer's weights; those that it shares with the model, such as the LM head, are stored once."""
    with closing(open_engine(pair.engine)) as engine:
        program = engine.program
    assert [section.name for section in program.sections] == ["tap", "draft_layer"]
    assert program.speculation.drafter == "mtp"
    own = {name for name in program.weights if name.startswith("draft_layer.")}
    assert {"draft_layer.eh_proj", "draft_layer.enorm"} <= {".".join(name.split(".")[:2]) for name in own}
    assert not any("lm_head" in name or "embed_tokens" in name for name in own)
    assert "draft_layer" in str(describe_engine(pair.engine))
    assert "draft-layer" in (pair.engine / "report.json").read_text()


def test_a_request_cannot_give_what_the_layer_is_given(pair: Pair) -> None:
    with load(pair.engine, threads=1, spec="none") as llm:
        assert not llm.executor.inputs


def test_refusals(pair: Pair, compiled: Any, tmp_path: Path) -> None:
    """A checkpoint without such a layer, an engine compiled without it, and a model with rotated hidden states."""
    llama = compiled("llama")
    with pytest.raises(UsageError, match="--spec mtp: the checkpoint has no layer"):
        icc.compile(llama.checkpoint, tmp_path / "x.engine", target="native", spec="mtp")
    assert not (tmp_path / "x.engine").exists()
    with pytest.raises(UsageError, match="--spec mtp: the engine has no layer that guesses"):
        load(llama.engine, spec="mtp")
    with pytest.raises(UsageError, match="--spec mtp does not work with --rotate"):
        icc.compile(pair.checkpoint, tmp_path / "x.engine", target="native", spec="mtp", quant="rtn4", rotate=True)
    with pytest.raises(UsageError, match="--spec mtp does not work with --adapters"):
        icc.compile(pair.checkpoint, tmp_path / "x.engine", target="native", spec="mtp", adapters="2x16")
    assert not (tmp_path / "x.engine").exists()


def test_without_the_flag_nothing_changes(pair: Pair) -> None:
    """The layer is left out of the graph, and its tensors are not read."""
    graph = load_graph(pair.checkpoint)
    assert not graph.sections and not graph.declared
    assert not any("mtp" in name or f"layers.{graph.info.num_layers}." in name for name in graph.weights)


def test_a_compiled_prompt_has_what_the_layer_keeps_of_it(pair: Pair, tmp_path: Path) -> None:
    """The bytes that a request with this drafter leaves in the cache: without them, the layer would guess as if the
    prompt were empty."""
    tokens = list(range(10, 74))
    stage = shutil.copytree(pair.engine, tmp_path / "engine")
    found = compute_prompts(stage, [CompiledPrompt("p", "text", [*tokens, 5], len(tokens))])
    assert found is not None
    with always(load(pair.engine, threads=1), "mtp") as llm:
        llm.generate([tokens], PARAMS[0])
        kept = llm.loop.scheduler.kv.found(CachedSequence(tokens=tokens), len(tokens))
        assert kept is not None
        bits = b"".join(KVBlocks(digest_of(llm.manifest), cast(Any, llm.executor)).read(cast(Any, kept)))
    assert (stage / found.prompts[0].file).read_bytes() == bits
