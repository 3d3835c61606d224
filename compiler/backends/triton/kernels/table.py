"""Which Triton kernel implements each op of a program."""

from __future__ import annotations

from typing import Any

from ....program.steps import attention, embedding, linear, norm, pointwise, rowwise, state
from ....program.steps.base import Step
from ...kernel_table import KernelTable
from ..spec import StepKernel
from .attention import Attention
from .bmm import Bmm
from .choosing import ChooseKeys
from .index import Embedding, Gather, Scatter, SelectRows, Topk
from .kv_cache import KvWrite
from .linear import ExpertLinear, Linear
from .norm import Norm
from .pointwise import Pointwise
from .rowwise import Cumsum, Hadamard, Reduce, Softmax
from .state import CausalConv, ChannelScan, GatedScan, SelectiveScan

_KERNELS: dict[type[Step], type[StepKernel[Any]]] = {
    linear.Linear: Linear, linear.LinearQ: Linear,
    linear.ExpertLinear: ExpertLinear, linear.ExpertLinearQ: ExpertLinear,
    embedding.Embedding: Embedding, embedding.SelectRows: SelectRows,
    norm.RmsNorm: Norm, norm.AddRmsNorm: Norm, norm.LayerNorm: Norm, norm.AddLayerNorm: Norm,
    rowwise.Reduce: Reduce, rowwise.Softmax: Softmax, rowwise.Cumsum: Cumsum, rowwise.Topk: Topk,
    rowwise.Gather: Gather, rowwise.Scatter: Scatter, rowwise.Bmm: Bmm,
    rowwise.Hadamard: Hadamard,
    attention.KvWrite: KvWrite, attention.Attention: Attention, attention.ChooseKeys: ChooseKeys,
    pointwise.Pointwise: Pointwise,
    state.CausalConv: CausalConv, state.ChannelScan: ChannelScan, state.GatedScan: GatedScan,
    state.SelectiveScan: SelectiveScan,
}  # fmt: skip

TRITON_KERNELS: KernelTable[type[StepKernel[Any]]] = KernelTable("Triton")
for _step, _kernel in _KERNELS.items():
    TRITON_KERNELS.register(_step, _kernel)
