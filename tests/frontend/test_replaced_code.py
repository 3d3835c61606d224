"""Code of models that cannot be traced: loops over experts, and indices that pick every token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from icc.compiler.errors import UnsupportedModel
from icc.compiler.frontend.export import interfaces
from icc.compiler.frontend.export.experts import EXPERTS
from icc.compiler.frontend.export.lightning import LIGHTNING
from icc.compiler.frontend.export.selection import SELECTION
from icc.compiler.frontend.export.substitution import (
    Candidate,
    CodeTrial,
    Substitution,
    recognised_as,
    small_copy,
    substituted,
)
from icc.compiler.frontend.export.trace import SUBSTITUTIONS
from icc.compiler.frontend.mask_spec import AllVisible, KeyBias, MaskSpec, MaskUsed, Picked, longest_sequence
from icc.compiler.frontend.source.model import parts_that_can_be_built
from torch import Tensor, nn
from transformers import (
    AutoModel,
    JetMoeConfig,
    Llama4TextConfig,
    LongcatFlashConfig,
    MiniMaxConfig,
    Qwen4ExpTextConfig,
)
from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoA, JetMoeMoE
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextQSAIndexer


def recognised(module: nn.Module, substitutions: Any = SUBSTITUTIONS) -> Substitution | None:
    """The substitution that the forward function of a module is recognised as; None if there is none."""
    cls = type(module)
    return recognised_as(Candidate(cls, "forward", cls.forward, module), substitutions)


def longcat() -> nn.Module:
    return LongcatFlashExperts(
        LongcatFlashConfig(hidden_size=6144, expert_ffn_hidden_size=2048, n_routed_experts=16, zero_expert_num=4)
    )


def dbrx() -> nn.Module:
    config = DbrxFFNConfig(hidden_size=6144, ffn_hidden_size=10752, moe_num_experts=16, moe_top_k=4)
    return DbrxExperts(config)


def llama4() -> nn.Module:
    sizes: dict[str, Any] = {
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
    }
    return Llama4TextMoe(Llama4TextConfig(**sizes))


def jetmoe() -> nn.Module:
    return JetMoeMoE(JetMoeConfig())


def jetmoe_queries() -> nn.Module:
    return JetMoeMoA(JetMoeConfig())


@pytest.mark.parametrize("make", [longcat, dbrx, llama4, jetmoe, jetmoe_queries])
def test_large_experts_are_recognised_without_their_weights(make: Any) -> None:
    with torch.device("meta"):
        module = make()
    assert recognised(module) in EXPERTS
    assert all(p.device.type == "meta" for p in module.parameters())


class Reversed(LongcatFlashExperts):
    """LongCat's experts with the activation on the other half."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for token, (picks, weights) in enumerate(zip(top_k_index.tolist(), top_k_weights.tolist(), strict=True)):
            for pick, weight in zip(picks, weights, strict=True):
                x = hidden_states[token]
                if pick < self.num_routed_experts:
                    gate, up = (self.gate_up_proj[pick] @ x).chunk(2)
                    x = self.down_proj[pick] @ (self.act_fn(up) * gate)
                out[token] += weight * x
        return out


def test_what_computes_almost_the_same_is_left_alone() -> None:
    config = LongcatFlashConfig(hidden_size=64, expert_ffn_hidden_size=96, n_routed_experts=4, zero_expert_num=1)
    assert recognised(LongcatFlashExperts(config)) is EXPERTS[0]
    assert recognised(Reversed(config)) is None


def test_other_modules_are_left_alone() -> None:
    class Picks(nn.Module):
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return hidden_states

    assert recognised(Picks()) is None
    assert recognised(nn.Linear(2, 2)) is None


class Undecayed(MiniMaxLightningAttention):
    """Lightning attention, except that two blocks do not share a state."""

    def decay_factors(self, slope_rate: Tensor) -> Any:
        query, key, diagonal = super().decay_factors(slope_rate)
        return query * 0, key, diagonal


def test_attention_in_blocks_of_tokens_is_known_by_what_it_computes() -> None:
    config = MiniMaxConfig(num_hidden_layers=3, layer_types=["linear_attention"] * 3)
    with torch.device("meta"):
        module, other = MiniMaxLightningAttention(config, 1), Undecayed(config, 1)
    assert recognised(module) is LIGHTNING and recognised(other) is None
    assert module.qkv_proj.weight.device.type == "meta" and module.block_size == config.block_size
    forward = MiniMaxLightningAttention.forward
    with substituted(module, [LIGHTNING]):
        assert MiniMaxLightningAttention.forward is not forward
        with pytest.raises(UnsupportedModel, match="attention_mask"):
            module(torch.zeros(1, 2, 8, device="meta"), None, torch.ones(1, 2))
    assert MiniMaxLightningAttention.forward is forward


def test_a_mask_is_added_to_scores_and_nothing_else() -> None:
    mask = MaskSpec()
    with longest_sequence(64):
        table = torch.zeros(1, 3, 3)
        scores: Any = table + mask[:, 0, :, :]  # type: ignore[operator]
        assert scores.topk(min(64, scores.shape[-1]), dim=-1).indices.to(torch.int32) == AllVisible(mask)
        some = scores.topk(min(63, scores.shape[-1]), dim=-1).indices.to(torch.int32)
        assert isinstance(some, Picked) and some.count == 63 and some.scores is table
        uses = (
            lambda: mask == 0,
            lambda: mask[:, :, :2],
            lambda: torch.softmax(scores, dim=-1),
            lambda: scores.topk(2, largest=False),
            lambda: 1.0 + mask,
        )
        for use in uses:
            with pytest.raises(MaskUsed):
                use()
    assert MaskSpec(window=3) == MaskSpec(window=3) != mask


def test_what_is_added_for_each_key_is_more_of_a_head() -> None:
    mask, scale = MaskSpec(), 0.3
    q, k, row = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 1, 5)
    whole: Any = row.expand(1, 2, 5, 5)
    bias = whole.masked_fill(mask[:, :, :, :] != 0, -1e9)
    assert isinstance(bias, KeyBias) and torch.equal(bias.row, row) and bias[:, :, None].expand(9).reshape(9) is bias
    longer_q, longer_k = interfaces._with_key_bias(q, k, row, scale)
    found, expected = (a @ b.repeat_interleave(2, 1).mT * scale for a, b in ((longer_q, longer_k), (q, k)))
    torch.testing.assert_close(found, expected + row.repeat_interleave(2, 1))
    for use in (
        lambda: whole.masked_fill(mask == 1, 0.0),
        lambda: bias + 1,
        lambda: bias[:, :1],
        lambda: whole + ~bias,
    ):
        with pytest.raises((MaskUsed, TypeError)):
            use()


def test_keys_that_are_no_tokens_are_refused() -> None:
    """For instance a key for a window of tokens, which DeepSeek-V4 appends to the keys of the tokens."""
    q, k = torch.zeros(1, 2, 13, 8), torch.zeros(1, 1, 16, 8)
    with pytest.raises(UnsupportedModel, match="keys that are no tokens"):
        interfaces.icc_attention(nn.Module(), q, k, k, MaskSpec())


class Half(Qwen4ExpTextQSAIndexer):
    """An index that picks half of its blocks."""

    def forward(self, *given: Any) -> Tensor:
        picked, self.block_topk = self.block_topk, self.block_topk // 2
        try:
            return super().forward(*given)
        finally:
            self.block_topk = picked


def test_tokens_picked_query_by_query_are_all_within_the_budget() -> None:
    sizes = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_compress_ratio": 4}
    config = Qwen4ExpTextConfig(indexer_budget=512, **sizes)
    with torch.device("meta"):
        module, other = Qwen4ExpTextQSAIndexer(config, 0), Half(config, 0)
    assert recognised(module) is SELECTION and recognised(other) is None
    mask, x = MaskSpec(), torch.zeros(1, 2, config.hidden_size, device="meta")
    with substituted(module, [SELECTION]), longest_sequence(515):  # 128 blocks of 4, and the keys after them
        assert mask.masked_fill(~module(x, None, mask, None), -1e9) is mask  # type: ignore[operator]
        with pytest.raises(MaskUsed):
            mask.masked_fill(module(x, None, mask, None), -1e9)
        with longest_sequence(516), pytest.raises(UnsupportedModel, match="picks the 515 tokens"):
            module(x, None, mask, None)


def test_a_substitution_is_a_value() -> None:
    """A substitution of this test: a candidate is run on small inputs, and replaced if it computes what the value
    defines."""

    class Doubled(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def forward(self, x: Tensor) -> tuple[Tensor, str]:
            return x * self.by, "and more"

    class Tripled(Doubled):
        pass

    def small(candidate: Candidate, generator: torch.Generator) -> Any:
        x = torch.randn(3, generator=generator)
        yield CodeTrial(lambda: candidate.module(x), (x,))
        yield CodeTrial(lambda: candidate.module(x + 1), (x,), same=False)

    seen: list[Tensor] = []
    doubling = Substitution(
        find=lambda candidate: candidate.takes == ("x",),
        small=small,
        reference=lambda x: x + x,
        replacement=lambda candidate: {"forward": lambda self, x: seen.append(x) or x + x},
    )
    model = nn.ModuleList([Doubled(2.0), Tripled(3.0)])
    x = torch.ones(3)
    with substituted(model, [doubling]):
        out, rest = model[0](x)
        assert seen == [x] and rest is None and torch.equal(out, x + x)  # later elements of a tuple are left out
        assert model[1](x)[1] == "and more"
    assert model[0](x)[1] == "and more" and len(seen) == 1


def test_a_small_copy_is_not_large() -> None:
    with torch.device("meta"):
        module = nn.Linear(2**13, 2**13)
    generator = torch.Generator().manual_seed(0)
    assert small_copy(module, {2**13: 4}, generator).weight.shape == (4, 4)
    with pytest.raises(ValueError, match="weight has"):
        small_copy(module, {}, generator)


def test_towers_that_need_a_missing_package_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Because text goes through no tower; the text model itself is not left out."""
    text, image = object(), object()

    def refuse(config: object) -> nn.Module:
        raise ImportError("timm")

    monkeypatch.setattr(AutoModel, "from_config", refuse)
    with parts_that_can_be_built(text):
        assert not list(AutoModel.from_config(image).parameters())
        with pytest.raises(ImportError):
            AutoModel.from_config(text)
    assert AutoModel.from_config is refuse
