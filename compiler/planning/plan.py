"""`icc plan`: estimates the size and speed of an engine from config.json: nothing is compiled and no weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ...runtime.format.footprint import length_within
from ...runtime.format.kv import KVLayout
from ..frontend.source.unread import planned_source
from ..measure import available_bytes, memory_bandwidth, num_threads
from ..options import CompileOptions
from ..request import check_found, find_model
from ..targets import CPU_CORES, Target, find_target
from .devices import DevicesPlan, plan_devices
from .effort import Effort, effort
from .program import PlannedCompile, plan_graph, plan_program
from .room import room_for_kv, sequences_that_fit
from .speed import Rate, rates


@dataclass(frozen=True)
class TargetPlan:
    """The estimate for an engine on one target. memory: bytes that the target has for it. sequences: number of
    full-length sequences that its KV cache holds at once; longest: tokens of the longest sequence that it holds.
    devices: how several devices can share the work; None if not asked for."""

    target: Target
    planned: PlannedCompile
    memory: int
    sequences: int
    longest: int
    rates: Sequence[Rate]
    effort: Effort
    devices: DevicesPlan | None = None

    @property
    def fits(self) -> bool:
        """Whether a full batch of full sequences fits."""
        return self.sequences >= self.planned.limits.max_batch_size

    def as_json(self) -> dict[str, Any]:
        """What `icc plan --json` prints for a target: sizes in bytes, limits of speed, and the effort of the
        compile."""
        planned, program = self.planned, self.planned.program
        formats: dict[str, int] = {}
        for weight in program.stored.values():
            formats[weight.format] = formats.get(weight.format, 0) + weight.nbytes
        return {
            "target": self.target.name,
            "limits": msgspec.structs.asdict(planned.limits),
            "bytes": {
                "weights": sum(formats.values()),
                "weights_by_format": dict(sorted(formats.items())),
                "kv_per_token": program.kv.bytes_per_token(),
                "kv_one_sequence": planned.memory.kv_sequence,
                "kv_full_batch": planned.memory.kv_batch,
                "arena": planned.memory.arena,
                "scratch": planned.memory.scratch,
                "logits": planned.memory.logits,
                "total": planned.memory.fixed + planned.memory.kv_batch,
            },
            "kv_dtype": _kv_dtypes(program.kv),
            "memory_bytes": self.memory,
            "fits": self.fits,
            "sequences_that_fit": self.sequences,
            "longest_sequence_that_fits": self.longest,
            "limits_of_speed": [rate.as_json() for rate in self.rates],
            "bandwidth_gb_s": self.target.bandwidth,
            "compile": self.effort.as_json(),
            **({} if self.devices is None else {"devices": self.devices.as_json()}),
        }


@dataclass(frozen=True)
class Plan:
    """Estimates for engines of one model on some targets. options: those of the planned compile."""

    options: CompileOptions
    targets: Sequence[TargetPlan]

    def as_json(self) -> dict[str, Any]:
        """All fields as plain values, in bytes, seconds and tokens per second."""
        first = self.targets[0].planned
        info, limits = first.graph.info, first.limits
        return {
            "model": str(self.options.model),
            "architecture": info.architecture,
            "parameters": info.num_parameters,
            "layers": info.num_layers,
            "quant": self.options.quant,
            "limits": {
                "max_seq_len": limits.max_seq_len,
                "max_batch_size": limits.max_batch_size,
                "max_step_tokens": limits.max_step_tokens,
            },
            "kept": list(first.kept),
            "targets": [found.as_json() for found in self.targets],
        }


def make_plan(
    options: CompileOptions,
    targets: Sequence[str],
    memory: int | None = None,
    bandwidth: float | None = None,
    devices: int | None = None,
) -> Plan:
    """Plan compiles with `options` for the targets, given by name. For a model on the hub only config.json is fetched.

    memory: bytes of one device to fit into; None: the target's own. bandwidth: of one device in GB/s; None: the
    target's own, or that of this machine for a CPU. devices: number of devices that share the work; None: sharing is
    not planned. Raises the errors of a compile.
    """
    model = find_model(options.model)
    check_found(model, options)
    options = replace(options, model=model.path)
    encodes = options.task != "generate" and all(find_target(name).backend == "cpu" for name in targets)
    graph = plan_graph(planned_source(model.path, options.task), options, encodes)
    plans: list[TargetPlan] = []
    for name in targets:
        target = find_target(name)
        planned = plan_program(graph, options, target)
        target = _as_here(target, planned.memory.weights, bandwidth)
        found = _on(planned, target, options, memory or _memory(target))
        if devices is not None:
            found = replace(found, devices=plan_devices(graph, planned, options, target, devices, found.memory))
        plans.append(found)
    return Plan(options, plans)


def _on(planned: PlannedCompile, target: Target, options: CompileOptions, memory: int) -> TargetPlan:
    kv = planned.program.kv
    room = room_for_kv(planned, target, memory)
    longest = length_within(kv, planned.limits, room) if memory > planned.memory.fixed else 0
    found = rates(planned, target, planned.limits.max_batch_size, planned.limits.max_seq_len)
    sequences = sequences_that_fit(planned, target, memory)
    return TargetPlan(target, planned, memory, sequences, longest, found, effort(planned, options, target))


def _as_here(target: Target, weights: int, bandwidth: float | None) -> Target:
    """The target with the given bandwidth, in GB/s; None: its own, but for a CPU the speed at which this machine reads
    `weights` bytes. The peaks of a CPU target are for two cores, and are scaled to this machine's number of cores."""
    if target.backend == "cpu":
        cores, bandwidth = num_threads() / CPU_CORES, bandwidth or memory_bandwidth(weights)
        target = replace(target, peak_f16=target.peak_f16 * cores, peak_i8=target.peak_i8 * cores)
    return target if bandwidth is None else replace(target, bandwidth=bandwidth)


def _memory(target: Target) -> int:
    """The memory of a target in bytes: for a GPU that of its kind; for a CPU the available memory of this machine."""
    return int(target.memory_gib * 2**30) if target.memory_gib else available_bytes()


def _kv_dtypes(kv: KVLayout) -> str:
    return "+".join(dict.fromkeys(group.dtype for group in kv.groups))
