"""Rotary embedding by complex numbers, as DeepSeek-V2 and Llama 4 write it, and masks that no layer uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from icc.compiler.frontend.export.interfaces import icc_mask
from icc.compiler.frontend.load import trace_model
from icc.compiler.graph.interpret import interpret
from icc.compiler.ops import OPS
from icc.compiler.weights.handles import Constant
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from torch import Tensor, nn

HEADS, DIM, VOCAB, TOKENS = 2, 8, 20, 11


class Rotated(nn.Module):
    """Attention of one layer whose queries and keys are rotated as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HEADS * DIM)
        self.head = nn.Linear(HEADS * DIM, VOCAB, bias=False)
        self.config: Any = SimpleNamespace(
            vocab_size=VOCAB, hidden_size=HEADS * DIM, num_hidden_layers=1, max_position_embeddings=64,
            get_text_config=lambda: self.config, _attn_implementation="icc",
        )  # fmt: skip

    def forward(self, input_ids: Tensor, use_cache: bool = False, return_dict: bool = True) -> Any:
        x = self.embed(input_ids).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        angles = positions[None, :, None] * torch.full((DIM // 2,), 0.3, device=input_ids.device).cumsum(0)
        turns = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)

        def rotate(value: Tensor) -> Tensor:
            pairs = torch.view_as_complex(value.reshape(*value.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turns).flatten(3)

        query, key = rotate(x), rotate(x * 2)
        scores = query @ key.transpose(2, 3)
        seen = positions[:, None] >= positions[None, :]
        out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ x
        return SimpleNamespace(logits=self.head(out.transpose(1, 2).flatten(2)))


def test_complex_rotation_is_fused_into_attention() -> None:
    torch.manual_seed(0)
    real = Rotated()
    with torch.device("meta"):
        model = Rotated()
    weights: dict[str, Any] = {name: Constant(value.detach()) for name, value in real.state_dict().items()}
    graph = trace_model(model, model.config, weights, 32)
    ids = torch.arange(TOKENS) % VOCAB
    with torch.no_grad():
        expected = real(ids[None]).logits[0]
    torch.testing.assert_close(interpret(graph, ids.tolist()), expected, atol=1e-5, rtol=1e-5)
    run_passes(graph, [*pipelines.canonicalize(), *pipelines.attention()], PassContext())
    assert not any(node.target is OPS["rope"].overload for node in graph.nodes)
    found = interpret(graph, ids.tolist(), list(range(TOKENS)))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_mask_that_no_layer_uses_is_refused_where_it_is_used() -> None:
    assert "neither causal" in icc_mask(mask_function=lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0)).refused
    for window in (0, -1):  # as it may be in a config.json
        blind = icc_mask(mask_function=lambda b, h, q, k: (k <= q) & (k > q - window), local_size=window)  # noqa: B023
        assert "hides all tokens" in blind.refused
    assert not icc_mask(mask_function=lambda b, h, q, k: k <= q).refused
    both = icc_mask(mask_function=lambda b, h, q, k: (k - q).abs() <= 3)
    assert (both.window, both.ahead, both.refused) == (4, 3, "")
