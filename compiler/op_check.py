"""For tests of an op of another package: compares its GPU kernels with its reference, without a GPU."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from .graph.graph import Graph, ModelInfo
from .graph.tensor_types import FIXED_INPUTS
from .ops import OPS, Op
from .targets import find_target
from .weights.handles import Constant

_convert = torch.ops.prims.convert_element_type.default
_view = torch.ops.aten.view.default


def check_triton_op(op: Op, samples: Iterable[tuple[Any, ...]] | None = None, target: str = "h100") -> None:
    """Raise ValueError if the Triton kernels of `op`, or those that fusion makes from its `instructions`, differ from
    its reference: by more than `op.tolerance` times the largest finite number, or finite where the reference is not.

    samples: tuples of the op's arguments; None for those of `set_samples`. The first axis of tensors is the rows, as
    many as the first tensor has, except for `Traits.weights` and, in elementwise ops, tensors with fewer axes than
    others or one row. EachEach sample runs like a step of a GPU engine for `target`, as a prompt and as one token of
    each of several sequences, in Triton's interpreter: the environment needs TRITON_INTERPRET=1 before triton is
    imported (RuntimeError otherwise). ValueError also for an op that mixes tokens, keeps a state or works on several
    ranks, and if there is no sample; VerifyError or CodegenError if a kernel is missing or refuses the step.
    """
    traits = op.traits
    if traits.mixes_tokens or traits.stateful or traits.collective:
        raise ValueError(f"{op.name}: rows depend on each other, on a state or on other ranks; icc cannot check it")
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set TRITON_INTERPRET=1 in the environment before triton is imported")
    found = list(samples if samples is not None else op.samples() if op.samples else ())
    if not found:
        raise ValueError(f"{op.name}: there is no sample to check; give some, or declare them by set_samples")
    for number, arguments in enumerate(found):
        _check(op, arguments, target, f"{op.name}, sample {number}")


def _check(op: Op, arguments: tuple[Any, ...], target: str, name: str) -> None:
    from ..passes import pipelines
    from ..passes.base import PassContext
    from ..passes.manager import run_passes
    from .measure.interpreted import interpreted_steps

    made = op.reference(*arguments)
    results = list(made) if isinstance(made, (tuple, list)) else [made]
    rows = len(next(_tensors(arguments)))
    if any(result.dim() < 2 or len(result) != rows for result in results):
        raise ValueError(f"{name}: results must be [{rows}, ..], not {[tuple(r.shape) for r in results]}")
    graph = _graph_of(op, arguments, rows, len(results))
    for phase in (pipelines.canonicalize(), pipelines.attention(), pipelines.fuse()):
        run_passes(graph, phase, PassContext())
    wanted = torch.cat([result.reshape(rows, -1).float() for result in results], 1)
    for step, logits in interpreted_steps(graph, rows, find_target(target)).items():
        _compare(wanted, logits, op.tolerance, f"{name}, {step}")


def _compare(wanted: Tensor, found: Tensor, tolerance: float, name: str) -> None:
    finite = wanted[wanted.isfinite()]
    bound = tolerance * float(finite.abs().max()) if len(finite) else 0.0
    wrong = ~torch.isclose(found, wanted, rtol=0.0, atol=bound, equal_nan=True)
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} numbers are off by more than {bound:g}; that of row {row}, "
            f"element {column} is {float(found[row, column]):g}, and {float(wanted[row, column]):g} by the reference"
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _graph_of(op: Op, arguments: tuple[Any, ...], rows: int, results: int) -> Graph:
    """A graph of one call of the op on rows gathered by token id, with its results concatenated as logits [rows, n]."""
    info = ModelInfo(op.name, rows, 0, 0, 0, None, torch.float32)
    graph = Graph(fx.Graph(), {}, info, max_seq_len=rows)
    tokens = graph.fx.placeholder("token_ids")
    tokens.meta["type"] = FIXED_INPUTS["token_ids"]
    axes = max(tensor.dim() for tensor in _tensors(arguments))

    def given(value: Any, label: str, constant: bool) -> Any:
        if isinstance(value, (tuple, list)):
            return [given(item, f"{label}.{i}", constant) for i, item in enumerate(value)]
        if not isinstance(value, Tensor):
            return value
        shared = op.traits.elementwise and (value.dim() < axes or len(value) < rows)
        if constant or shared:
            return graph.add_weight(label, Constant(value))
        gathered = graph.call(OPS["embedding"].overload, tokens, graph.add_weight(label, Constant(value.float())))
        return gathered if value.is_floating_point() else graph.call(_convert, gathered, value.dtype)

    values = [given(value, f"argument{i}", i in op.traits.weights) for i, value in enumerate(arguments)]
    call = graph.call(op.overload, *values)
    parts = [graph.call(operator.getitem, call, i) for i in range(results)] if results > 1 else [call]
    flat = [graph.call(_view, part, [-1, part.meta["type"].meta()[0].numel()]) for part in parts]
    floats = [x if x.meta["type"].dtype.is_floating_point else graph.call(_convert, x, torch.float32) for x in flat]
    graph.returns(logits=graph.call(torch.ops.aten.cat.default, floats, 1) if results > 1 else floats[0])
    return graph
