"""torch.export of a causal language model on meta, with a dynamic token count."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.fx.config
from torch import Tensor, nn
from torch.export import ExportedProgram

from ....runtime.format.batch import BatchArray
from ...errors import IccError, TraceError, UnsupportedModel
from ...graph.tensor_types import input_type
from ..layers.kinds import LayerKinds, RepeatedLayer
from ..layers.marks import join_repeated
from ..mask_spec import longest_sequence
from .decompose import decompose
from .experts import EXPERTS
from .interfaces import tracing_interfaces
from .lightning import LIGHTNING
from .one_sequence import masks_of_one_sequence
from .recurrences import RECURRENCES
from .rescaled import weights_as_stored
from .selection import SELECTION
from .substitution import Substitution, substituted

# Not decomposed, because the dialect has them or their decomposition would lose precision.
KEPT_ATEN = (
    "linear",
    "silu",
    "gelu",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "stack",
    "split",
    "scaled_dot_product_attention",
    "_safe_softmax",
)

# Code that is replaced because of what it computes. The other contexts of a trace replace no computation:
# `tracing_interfaces` is about registries and meta tensors, `one_sequence` about indexing, `rescaled` about weights,
# and `longest_sequence` sets a number.
SUBSTITUTIONS: tuple[Substitution, ...] = (*RECURRENCES, *EXPERTS, LIGHTNING, SELECTION)
SHORTEST = 3
_LARGEST_SHORTEST = 8


class _Forward(nn.Module):
    """The traced signature: (input_ids[1, T], position_ids[1, T], and rows[1, T, ...] of each declared input) ->
    logits[1, T, vocab]; hidden states[1, T, H] for a model without LM head; [1, labels] for a model that scores a text.

    The model computes its own positions: some models do not count from 0, and given position_ids would hide that. The
    result of its `arange` becomes the graph's `positions` input.
    """

    def __init__(self, model: nn.Module, kinds: LayerKinds | None, declared: Sequence[BatchArray] = ()) -> None:
        super().__init__()
        self.model = model
        self.kinds = kinds
        self.names = [array.name for array in declared]
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.kept = [name for name in ("use_cache", "use_mems") if name in parameters]
        if takes_any and not self.kept:
            self.kept = ["use_cache"]

    def forward(self, input_ids: Tensor, position_ids: Tensor, *declared: Tensor) -> Tensor:
        if self.kinds is not None:
            self.kinds.start()
        given: dict[str, Any] = {"input_ids": input_ids, **dict(zip(self.names, declared, strict=True))}
        given |= dict.fromkeys(self.kept, False)
        result = self.model(**given, return_dict=True)
        return result.logits if hasattr(result, "logits") else result.last_hidden_state


@contextlib.contextmanager
def _without_logged_errors() -> Iterator[None]:
    """A context in which torch does not log the traceback of an op that fails on meta; icc reports it in one line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _without_stack_traces() -> contextlib.AbstractContextManager[Any]:
    """A context in which torch.export does not store a stack trace with every node: icc does not read them."""
    return mock.patch.object(torch.fx.config, "do_not_emit_stack_traces", True, create=True)


@dataclass(frozen=True)
class Traced:
    """A model as one exported program. Layers equal to a traced one are only named in it, and described by `repeats`.

    shortest: length in tokens of the shortest sequence for which the program is known to be right.
    """

    program: ExportedProgram
    repeats: tuple[RepeatedLayer, ...] = ()
    shortest: int = SHORTEST


def export(
    model: nn.Module,
    max_tokens: int,
    kinds: LayerKinds | None = None,
    declared: Sequence[BatchArray] = (),
    shortest: int = SHORTEST,
) -> Traced:
    """Trace `model` (on meta) for `shortest` to `max_tokens` tokens. TraceError with the first line of the reason.

    If the code requires a few tokens more, it is traced from that number on. The results of a causal model for its
    first tokens do not depend on later ones, so shorter sequences are right, too; for other models this is not known.

    kinds: one layer of each kind is traced; None: all layers. declared: further arguments of the model, by their
    parameter names, with one row per token.
    """
    # Sizes that code may treat specially are left out: one token, one token but the last, and max_tokens, which is a
    # whole table for code that slices tables.
    tokens = torch.export.Dim("tokens", min=shortest, max=max(max_tokens, 16) - 1)
    ids, positions = (torch.zeros(1, 13, dtype=torch.long, device="meta") for _ in range(2))
    own = [torch.zeros(1, 13, *kind.shape, dtype=kind.dtype, device="meta") for kind in map(input_type, declared)]
    by_token = {1: tokens}
    dynamic = (by_token, by_token, *([(by_token,) * len(own)] if own else []))
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(substituted(model, SUBSTITUTIONS))
            stack.enter_context(weights_as_stored(model))
            stack.enter_context(torch.no_grad())
            stack.enter_context(tracing_interfaces())
            stack.enter_context(masks_of_one_sequence())
            stack.enter_context(longest_sequence(max_tokens))
            stack.enter_context(_without_stack_traces())
            stack.enter_context(_without_logged_errors())
            forward = _Forward(model, kinds, declared)
            if kinds is not None:
                kinds.scout(lambda: forward(ids, positions, *own))
                stack.enter_context(kinds.intercepted())
                stack.enter_context(kinds.emptied())
            program = torch.export.export(forward, (ids, positions, *own), dynamic_shapes=dynamic, strict=False)
            if kinds is not None:
                kinds.check(program.graph)
                join_repeated(program.graph)
            repeats = tuple(kinds.repeats) if kinds is not None else ()
            return Traced(decompose(program, KEPT_ATEN), repeats, shortest)
    except (IccError, MemoryError):
        raise
    except Exception as error:
        cause = next((e for e in _chain(error) if isinstance(e, (IccError, MemoryError))), None)
        if cause is not None:
            raise cause from error
        reason = _reason(error)
        more = re.search(r"number of tokens T: (\d+) <= T and T <= ", reason)
        if more and shortest < int(more[1]) <= _LARGEST_SHORTEST:
            return export(model, max_tokens, kinds, declared, int(more[1]))
        mixing = _mixing_module(model)
        if mixing is not None:
            raise mixing from error
        raise TraceError(
            f"cannot trace {type(model).__name__}: {reason}",
            "the model's code depends on the values or the number of tokens in a way that torch.export refuses",
        ) from error


def _reason(error: Exception) -> str:
    """The informative line of torch.export's message, reworded."""
    lines = [" ".join(line.split()) for line in str(error).split("\n") if line.strip()]
    if type(error).__name__ == "GuardOnDataDependentSymNode":
        return "the code branches by a value that it computes from the tokens"
    for line in lines:
        if "specialized it to be a constant" in line:
            return "the code takes the number of tokens T as a number that is known beforehand"
        for mark in ("satisfy the generated guard ", "your code "):
            if mark in line:
                guard = line.split(mark)[1].replace("L['input_ids'].size()[1]", "T").rstrip(".")
                return f"the code is specialised by the number of tokens T: {guard[:120]}"
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _mixing_module(model: nn.Module) -> UnsupportedModel | None:
    """The refusal of a model with a convolution over neighbouring tokens; None if it has none."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
            return UnsupportedModel(
                f"aten.conv1d in module {path!r} cannot be compiled: it mixes neighbouring tokens "
                "(a state-space, linear-attention or convolution layer)",
                "only ops that work per token, and attention, are supported",
                op="aten.conv1d",
                module=path,
            )
    return None


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
