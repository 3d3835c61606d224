"""Estimates the time and memory of a compile from a few measurements: the sample in README.md, and the 1B shape in
benchmarks/NOTES.md."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from math import prod

from ..options import CompileOptions
from ..quantization import find_quantization
from ..targets import Target
from ..weights.handles import is_quantized
from .program import PlannedCompile

# Seconds, on two cores of an AMD Zen 4 at 3.7 GHz; a machine with more cores packs and calibrates faster.
_MEASURED_CORES = 2
_START, _PER_NODE = 4.0, 0.002  # imports and the trace of one layer of each kind; passes, per node of the graph
_PER_KERNEL = {"cpu": 0.33, "native": 0.2, "gpu": 1.0}  # C++ for three instruction sets; for one; Triton, all phases
_PACK = {"none": 4e-9, "q4": 16e-9}  # per value, by its storage
# per quantized value and calibration token, and per quantized value
_CALIBRATE = {"awq": 3.0e-11, "gptq": 3.0e-11, "awq+gptq": 6.0e-11, "smooth": 3.0e-11, "auto": 6.0e-11}
_SEARCH = {"awq": 1.3e-7, "gptq": 1.3e-7, "awq+gptq": 2.0e-6, "smooth": 1.0e-7, "auto": 9.0e-7}
# Bytes of memory apart from mapped files.
_BASE = 600 << 20  # imports and the trace
_PER_VALUE = 4.0  # per value of the largest weight: one float32 copy at a time
_PER_ACTIVATION = 12.0  # per value of the calibration tokens in one layer: its input, its output, and one in between


@dataclass(frozen=True)
class Effort:
    """seconds: of the whole compile. memory: peak bytes apart from mapped files. disk: bytes of the engine."""

    seconds: float
    memory: int
    disk: int

    def as_json(self) -> dict[str, object]:
        """The fields by name."""
        return asdict(self)


def effort(plan: PlannedCompile, options: CompileOptions, target: Target) -> Effort:
    """An estimate of a compile's effort, within a factor of about two."""
    chosen = find_quantization(options.quant)
    values = [prod(weight.shape) for weight in plan.graph.weights.values()]
    info, cores = plan.graph.info, _MEASURED_CORES / max(1, min(os.cpu_count() or 1, 16))
    where = "gpu" if target.backend != "cpu" else "native" if target.is_here else "cpu"
    seconds = _START + _PER_NODE * len(list(plan.graph.nodes))
    seconds += _PER_KERNEL[where] * len(plan.program.kernels) * (cores if where == "gpu" else 1.0)
    seconds += sum(values) * _PACK["none" if chosen is None else "q4"] * cores
    memory = _BASE + _PER_VALUE * max(values, default=0)
    if chosen is not None and chosen.calibrated:
        tokens = options.calib_sequences * min(options.calib_length, plan.limits.max_seq_len)
        searched = sum(prod(weight.shape) for weight in plan.graph.weights.values() if is_quantized(weight))
        seconds += searched * (_CALIBRATE[chosen.method] * tokens + _SEARCH[chosen.method]) * cores
        memory += _PER_ACTIVATION * tokens * info.hidden_size
    return Effort(round(seconds, 1), int(memory), plan.memory.weights + (20 << 20))
