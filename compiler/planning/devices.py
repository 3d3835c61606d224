"""Compares ways in which several equal devices can share the work of a model: replicas, ranks that divide tensors,
experts or layers, and both; by the least time of their steps, their memory, and the bytes over links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from ..option_checks import most_ranks
from ..options import CompileOptions
from ..program.stages import stages_of, weights_of
from ..report import token_seconds
from ..targets import Target
from .program import PlannedCompile, PlannedGraph, divided_graph, plan_program
from .room import sequences_that_fit
from .speed import decode_time, prefill_time


@dataclass(frozen=True)
class DeviceArrangement:
    """replicas: number of independent engines. tensors, experts: number of ranks of a replica that divide these; if
    both are above 1, the same ranks divide both. stages: number of ranks that divide the layers. rows: whether ranks
    divide the norms and sums of prompts by rows."""

    replicas: int = 1
    tensors: int = 1
    experts: int = 1
    stages: int = 1
    rows: bool = False

    @property
    def ranks(self) -> int:
        """Devices of one replica."""
        return max(self.tensors, self.experts, self.stages)

    @property
    def name(self) -> str:
        """A short name for a table."""
        ways = {"tensors by": self.tensors, "experts by": self.experts, "layers by": self.stages}
        parts = [f"{what} {count}" for what, count in ways.items() if count > 1] + ["prompts by rows"] * self.rows
        return ", ".join([*parts, *[f"replicas {self.replicas}"] * (self.replicas > 1)]) or "one device"

    @property
    def options(self) -> str:
        """The options of `icc compile` and `icc serve` that select it."""
        asked = {
            "--tensor-parallel": self.tensors, "--expert-parallel": self.experts, "--pipeline-parallel": self.stages,
            "--replicas": self.replicas,
        }  # fmt: skip
        parts = [f"{option} {count}" for option, count in asked.items() if count > 1]
        return " ".join(parts + ["--sequence-parallel"] * self.rows) or "one device"


@dataclass(frozen=True)
class ArrangedPlan:
    """The estimate for an arrangement. weights: bytes on one device, for stages on the fullest one. sequences: number
    of full-length sequences that fit at once on all devices; fits: whether the requested number does. decode_seconds:
    time of a token of a single sequence; link_seconds: the part of it on links, over which each device reads
    link_bytes. prefill_seconds: time of one prompt step. tokens_per_s: of all devices, with the requested number of
    sequences."""

    arrangement: DeviceArrangement
    weights: int
    sequences: int
    fits: bool
    decode_seconds: float
    link_seconds: float
    link_bytes: float
    prefill_seconds: float
    tokens_per_s: float

    def as_json(self) -> dict[str, Any]:
        """The fields by name, with the options that select the arrangement."""
        return {**asdict(self), "options": self.arrangement.options}


@dataclass(frozen=True)
class DevicesPlan:
    """All arrangements of `devices` of a target, for `sequences` at once of `length` tokens each, with prompt steps of
    `chunk` tokens."""

    target: Target
    devices: int
    sequences: int
    length: int
    chunk: int
    arranged: Sequence[ArrangedPlan]

    @property
    def best(self) -> ArrangedPlan | None:
        """The arrangement with the most tokens per second among those that fit; None if none fits."""
        fitting = [found for found in self.arranged if found.fits]
        return max(fitting, key=lambda found: found.tokens_per_s, default=None)

    @property
    def quickest(self) -> ArrangedPlan | None:
        """The arrangement with the least time per token of a single sequence among those that fit; None if none
        fits."""
        fitting = [found for found in self.arranged if found.fits]
        return min(fitting, key=lambda found: found.decode_seconds, default=None)

    def as_json(self) -> dict[str, Any]:
        """All fields as plain values, in bytes, seconds and tokens per second."""
        best, quickest = self.best, self.quickest
        return {
            "devices": self.devices,
            "sequences": self.sequences,
            "length": self.length,
            "link_gb_s": self.target.link,
            "arrangements": [found.as_json() for found in self.arranged],
            "most_tokens_per_s": best and best.arrangement.options,
            "least_time_per_token": quickest and quickest.arrangement.options,
        }


def plan_devices(
    graph: PlannedGraph, single: PlannedCompile, options: CompileOptions, target: Target, devices: int, memory: int
) -> DevicesPlan:
    """Compare the arrangements of `devices`, each with `memory` bytes. single: the plan for one device. target: its
    target, with the bandwidth to plan for."""
    limits = single.limits
    length, sequences = limits.max_seq_len, limits.max_batch_size
    chunk = min(limits.max_step_tokens, length)
    arranged: list[ArrangedPlan] = []
    for arrangement in arrangements(devices, target):
        planned = single
        if arrangement.ranks > 1:
            ways = arrangement.tensors, arrangement.experts, arrangement.stages
            cost = token_seconds(target, single.backend.profile)
            divided = divided_graph(graph, options, *ways, cost, arrangement.rows)
            if divided is None:
                continue
            planned = plan_program(divided, options, target)
        arranged.append(_arranged(arrangement, planned, target, sequences, length, chunk, memory))
    return DevicesPlan(target, devices, sequences, length, chunk, arranged)


def arrangements(devices: int, target: Target) -> Iterator[DeviceArrangement]:
    """The arrangements to compare, with up to as many ranks as an engine of the target may have."""
    for ranks in range(1, min(devices, most_ranks(target)) + 1):
        if devices % ranks or (ranks > 1 and not target.link):
            continue
        if ranks == 1:
            yield DeviceArrangement(devices)
            continue
        replicas = devices // ranks
        yield from (DeviceArrangement(replicas, *kind) for kind in ((ranks, 1), (1, ranks), (ranks, ranks)))
        yield DeviceArrangement(replicas, ranks, rows=True)
        if target.backend == "cpu":
            yield DeviceArrangement(replicas, stages=ranks)


def _of_stages(planned: PlannedCompile, stages: int) -> tuple[int, float]:
    """The bytes of weights of the fullest stage, and the largest share of the KV layers in one stage."""
    program = planned.program
    weights = [sum(program.stored[n].nbytes for n in weights_of(program, stage) if n in program.stored)
               for stage in range(stages)]  # fmt: skip
    layers = [{step.layer for step, holders in zip(program.steps, stages_of(program), strict=True)
               if stage in holders and step.layer >= 0} for stage in range(stages)]  # fmt: skip
    return max(weights), max(map(len, layers)) / max(len(set().union(*layers)), 1)


def _arranged(
    arrangement: DeviceArrangement,
    planned: PlannedCompile,
    target: Target,
    sequences: int,
    length: int,
    chunk: int,
    memory: int,
) -> ArrangedPlan:
    own = -(-sequences // arrangement.replicas)  # sequences of one replica
    one, all_ = decode_time(planned, target, 1, length), decode_time(planned, target, own, length)
    layers = 1.0
    if arrangement.stages > 1:
        weights, layers = _of_stages(planned, arrangement.stages)
        planned = replace(planned, memory=msgspec.structs.replace(planned.memory, weights=weights))
    fitting = arrangement.replicas * sequences_that_fit(planned, target, memory, layers)
    return ArrangedPlan(
        arrangement,
        planned.memory.weights,
        fitting,
        fitting >= sequences,
        one.seconds,
        one.link,
        one.link_bytes,
        prefill_time(planned, target, chunk).seconds,
        min(sequences, own * arrangement.replicas) / all_.seconds,
    )
