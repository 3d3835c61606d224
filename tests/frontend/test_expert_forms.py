"""Modules of experts that cannot be exported are replaced where a form computes the same, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from icc.compiler.frontend.export import experts
from torch import Tensor, nn
from transformers import Llama4TextConfig, LongcatFlashConfig
from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts


def longcat() -> nn.Module:
    return LongcatFlashExperts(
        LongcatFlashConfig(hidden_size=6144, expert_ffn_hidden_size=2048, n_routed_experts=16, zero_expert_num=4)
    )


def dbrx() -> nn.Module:
    config = DbrxFFNConfig(hidden_size=6144, ffn_hidden_size=10752, moe_num_experts=16, moe_top_k=4)
    return DbrxExperts(config)


def llama4() -> nn.Module:
    sizes = {"hidden_size": 5120, "intermediate_size": 8192, "num_local_experts": 16, "num_experts_per_tok": 2}
    return Llama4TextMoe(Llama4TextConfig(**sizes))


@pytest.mark.parametrize("make", [longcat, dbrx, llama4])
def test_large_experts_are_recognised_without_their_weights(make: Any) -> None:
    with torch.device("meta"):
        module = make()
    assert experts._form_of(module) is not None
    assert all(p.device.type == "meta" for p in module.parameters())


class Reversed(LongcatFlashExperts):
    """The same weights, with the activation on the other half."""

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
    assert experts._form_of(LongcatFlashExperts(config)) is not None
    assert experts._form_of(Reversed(config)) is None


def test_other_modules_are_left_alone() -> None:
    class Picks(nn.Module):
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return hidden_states

    assert experts._form_of(Picks()) is None
    assert experts._form_of(nn.Linear(2, 2)) is None


def test_products_past_the_last_expert_are_zero() -> None:
    x, weight = torch.randn(3, 4), torch.randn(2, 5, 4)
    out = experts.plain_product(x, weight, torch.tensor([[0, 1], [1, 2], [2, 0]]))
    torch.testing.assert_close(out[0, 1], weight[1] @ x[0])
    assert not out[1, 1].any() and not out[2, 0].any()
