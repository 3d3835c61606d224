"""Runs the steps of a small graph as a GPU engine does, in Triton's interpreter: for tests of ops without a GPU."""

from __future__ import annotations

import msgspec
import torch

from ...runtime.batch.scheduled import ScheduledBatch, ScheduledSequence
from ...runtime.executor.player import Player
from ...runtime.format.manifest import Limits
from ..backends.triton.backend import TritonBackend
from ..backends.triton.plan import make_plan, plan_program
from ..backends.triton.tiling.choice import Tuner
from ..graph.graph import Graph
from ..program.lower import LowerOptions, lower
from ..program.verify import verify_lowered, verify_plan
from ..targets import Target
from .interpret import InterpretDevice

_BLOCK = 16


def interpreted_steps(graph: Graph, rows: int, target: Target) -> dict[str, torch.Tensor]:
    """Logits, float32 [rows, vocabulary], of an optimized graph for the tokens 0, 1, .., rows - 1, by the name of the
    step: once as one prompt, and once as the first tokens of `rows` sequences, which uses other kernels.

    The environment needs TRITON_INTERPRET=1 before triton is imported. VerifyError or CodegenError if the back end has
    no kernel for a step.
    """
    backend, limits = TritonBackend(target, graph.info.weight_dtype), Limits(max(rows, _BLOCK), rows, max(rows, _BLOCK))
    lowered = lower(graph, LowerOptions(backend.kv_dtype, backend.profile, _BLOCK))
    verify_lowered(lowered.program, backend.refusal)
    planned, blocks = plan_program(lowered.program, limits, Tuner(target)), -(-rows // _BLOCK)
    program = msgspec.structs.replace(lowered.program, plan=make_plan(planned, target, {}))
    verify_plan(program)
    packed = {name: backend.pack(source) for name, source in lowered.sources.items()}
    player = Player(InterpretDevice(program, planned.specs(), packed, limits, max(blocks, rows)))
    prompt = (ScheduledSequence(0, tuple(range(rows)), 0, (tuple(range(blocks)),), rows),)
    decode = tuple(ScheduledSequence(row, (row,), 0, ((row,),), 1) for row in range(rows))
    steps = {f"a prompt of {rows} tokens": prompt, f"a step of {rows} sequences": decode}
    return {name: torch.from_numpy(player.step(ScheduledBatch(of)).copy()) for name, of in steps.items()}
