"""Layers that mix tokens by a state, recognised by the traced computation and by the kernels that the code looks up."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from icc.compiler.errors import UnsupportedModel
from icc.compiler.frontend.export.recurrences import RECURRENCES
from icc.compiler.frontend.export.substitution import Candidate, recognised_as, substituted
from icc.compiler.frontend.export.trace import export
from icc.compiler.frontend.load import convert
from icc.compiler.graph.graph import ModelInfo
from icc.compiler.graph.interpret import interpret
from icc.compiler.weights.handles import Constant
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.bamba import modeling_bamba
from transformers.models.jamba import modeling_jamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.zamba import modeling_zamba

INFO = ModelInfo("of a test", 30, 16, 1, 1, None, torch.float32)
IDS = [3, 4, 5, 6, 7, 8, 9]


class Convolved(nn.Module):
    """A model of no known family: a convolution of each channel along the tokens, with only the `first` outputs
    used."""

    def __init__(self, padding: int, first: int) -> None:
        super().__init__()
        self.embed, self.head, self.first = nn.Embedding(30, 16), nn.Linear(16, 30), first
        self.conv = nn.Conv1d(16, 16, 4, groups=16, padding=padding)

    def forward(self, input_ids: Tensor, **options: object) -> CausalLMOutput:
        x = self.embed(input_ids)
        mixed = self.conv(x.transpose(1, 2))[..., self.first : self.first + x.shape[1]]
        return CausalLMOutput(logits=self.head(x + mixed.transpose(1, 2)))


def converted(padding: int, first: int, cls: type[Convolved] = Convolved) -> tuple[Tensor, Tensor]:
    """The logits of the graph and of the model, [T, vocab] each."""
    torch.manual_seed(0)
    model = cls(padding, first).eval()
    weights = {name: Constant(value.detach()) for name, value in model.state_dict().items()}
    with torch.device("meta"):
        shape = cls(padding, first).eval()
    graph = convert(export(shape, 64), weights, INFO, 64)
    with torch.no_grad():
        return interpret(graph, IDS), model(torch.tensor([IDS])).logits[0]


def test_a_convolution_that_sees_no_later_tokens_has_a_state() -> None:
    found, expected = converted(3, 0)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("first", [1, 3])
def test_one_that_does_is_refused(first: int) -> None:
    with pytest.raises(UnsupportedModel, match="slice"):
        converted(3, first)


CONV, DELTA, KIMI, MAMBA2, MAMBA, *_ = RECURRENCES
FILES = {
    modeling_jamba: {"mamba_selective_scan": MAMBA, "causal_conv1d_fn": CONV},
    modeling_zamba: {"mamba_selective_scan": MAMBA, "causal_conv1d_fn": CONV},
    modeling_bamba: {"mamba2_chunk_scan": MAMBA2, "causal_conv1d_fn": CONV, "segment_sum": None},
    modeling_qwen3_next: {"torch_chunk_gated_delta_rule": DELTA, "causal_conv1d_fn": CONV, "l2norm": None},
    modeling_kimi_linear: {"chunk_kimi_delta_attention": KIMI, "causal_conv1d_fn": CONV, "causal_conv1d_update": None},
}


@pytest.mark.parametrize("file", FILES)
def test_functions_of_files_are_known_by_what_they_compute(file: Any) -> None:
    """Independent of their names and of the kernels that they are decorated with."""
    for name, wanted in FILES[file].items():
        function = getattr(file, name)
        assert recognised_as(Candidate(file, "anything", inspect.unwrap(function)), RECURRENCES) is wanted, name
    empty: Any = type("Of", (nn.Module,), {"__module__": file.__name__})
    before = file.causal_conv1d_fn
    with substituted(empty(), RECURRENCES):
        assert file.causal_conv1d_fn is not before
    assert file.causal_conv1d_fn is before


def test_states_of_other_sequences_are_refused() -> None:
    x = torch.zeros(1, 4, 7)
    empty: Any = type("Of", (nn.Module,), {"__module__": modeling_jamba.__name__})
    with substituted(empty(), RECURRENCES), pytest.raises(UnsupportedModel, match="return_final_states"):
        modeling_jamba.causal_conv1d_fn(x, x[0, :, :3], return_final_states=True)


@pytest.mark.parametrize(("factor", "is_one"), [(1.0, True), (2.0, False)])
def test_loops_are_known_by_what_they_compute(factor: float, is_one: bool) -> None:
    """Neither by their names, nor by their parameters alone."""

    def loop(self: object, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor) -> Tensor:
        state, out = torch.zeros_like(hidden_states[:, 0]), []
        for t in range(hidden_states.shape[1]):
            state = recurrent_gate[:, t] * ~reset[:, t] * state + factor * hidden_states[:, t]
            out.append(state)
        return torch.stack(out, 1)

    cls: Any = type("Of", (nn.Module,), {"__module__": __name__, "anything": loop})
    with substituted(cls(), RECURRENCES):
        assert (cls.anything is not loop) == is_one
    assert cls.anything is loop


def test_a_shift_along_the_tokens_is_a_state() -> None:
    class Shifted(Convolved):
        def forward(self, input_ids: Tensor, **options: object) -> CausalLMOutput:
            x = self.embed(input_ids)
            return CausalLMOutput(logits=self.head(x + nn.functional.pad(x, (0, 0, 2, -2))))

    found, expected = converted(3, 0, Shifted)
    assert torch.allclose(found, expected, atol=1e-6)


def test_a_stack_of_weights_times_tokens_and_numbers_without_weights() -> None:
    """Heads with their own matrices, tokens on the last axis; a number that no op of the dialect computes."""

    class Stacked(Convolved):
        def __init__(self, padding: int, first: int) -> None:
            super().__init__(padding, first)
            self.heads = nn.Parameter(torch.randn(2, 3, 8))

        def forward(self, input_ids: Tensor, **options: object) -> CausalLMOutput:
            x = self.embed(input_ids)
            heads = x.transpose(1, 2).reshape(1, 2, 8, -1).transpose(0, 1)
            small = (self.heads[:, None] @ heads).transpose(-1, -2)  # [2, 1, T, 3]
            share = torch.distributions.Normal(0, 1).icdf(torch.tensor(0.95, device=x.device))
            return CausalLMOutput(logits=self.head(x + share * small.sum(dim=(0, 3)).unsqueeze(-1)))

    found, expected = converted(3, 0, Stacked)
    assert torch.allclose(found, expected, atol=1e-5)


class Padded(Convolved):
    """Convolutions over tokens padded in front, and all tokens except the last after an additional first row."""

    def __init__(self, padding: int, first: int) -> None:
        super().__init__(padding, first)
        self.each, self.groups = nn.Conv1d(16, 16, 3, groups=16), nn.Conv1d(16, 24, 2, groups=4)
        self.first_row, self.narrow = nn.Parameter(torch.randn(1, 1, 16)), nn.Linear(24, 16)

    def forward(self, input_ids: Tensor, **options: object) -> CausalLMOutput:
        x = self.embed(input_ids)
        mixed = self.groups(self.each(nn.functional.pad(x.transpose(1, 2), (3, 0)))).transpose(1, 2)
        before = torch.cat([self.first_row, x[:, :-1]], dim=1)
        return CausalLMOutput(logits=self.head(self.narrow(mixed) + before))


def test_padding_before_the_tokens_is_a_state() -> None:
    """The convolution over the padded tokens also."""
    found, expected = converted(3, 0, Padded)
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_longer_convolution_than_its_padding_is_refused() -> None:
    class Long(Padded):
        def __init__(self, padding: int, first: int) -> None:
            super().__init__(padding, first)
            self.each = nn.Conv1d(16, 16, 4, groups=16)

    with pytest.raises(UnsupportedModel, match="conv"):
        converted(3, 0, Long)


def test_a_trace_of_one_number_of_tokens_is_refused() -> None:
    """For instance with a Fourier transform over the tokens (FNet)."""

    class Transformed(Convolved):
        def forward(self, input_ids: Tensor, **options: object) -> CausalLMOutput:
            return CausalLMOutput(logits=self.head(torch.fft.fftn(self.embed(input_ids), dim=(1, 2)).real))

    with pytest.raises(UnsupportedModel, match="number of tokens as one that is known"):
        converted(3, 0, Transformed)


def test_masks_over_the_batch_choose_what_is_written() -> None:
    """With one sequence, the mask selects everything or nothing, which is known when the model is traced."""

    class Adapted(Convolved):
        def __init__(self, padding: int, first: int) -> None:
            super().__init__(padding, first)
            self.adapters = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, input_ids: Tensor, **options: object) -> CausalLMOutput:
            x = self.embed(input_ids)
            kinds, adapted = torch.ones(x.shape[0], device=x.device), torch.zeros_like(x)
            for kind, adapter in enumerate(self.adapters):
                mask = kinds == kind
                adapted[kinds == kind if self.first else mask] = adapter(x[mask])
            return CausalLMOutput(logits=self.head(x + adapted))

    found, expected = converted(3, 0, Adapted)
    assert torch.allclose(found, expected, atol=1e-6)
    with pytest.raises(UnsupportedModel, match="sequences of a batch"):
        converted(3, 1, Adapted)  # one mask for reading, another for writing
