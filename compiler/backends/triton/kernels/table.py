"""Which Triton kernel implements each op of a program."""

from __future__ import annotations

from typing import Any

from ....program.steps import attention, collective, embedding, linear, norm, pointwise, rowwise, state
from ....program.steps.base import Step
from ...kernel_table import KernelTable
from ..spec import StepKernel
from .attention import AttentionKernel
from .bmm import BmmKernel
from .choosing import ChooseKeysKernel
from .collective import CollectiveKernel
from .collective_rows import GatherRowsKernel, ReduceScatterKernel
from .index import EmbeddingKernel, GatherKernel, ScatterKernel, SelectRowsKernel, TopkKernel
from .kv_cache import KvWriteKernel
from .linear import ExpertLinearKernel, LinearKernel
from .norm import NormKernel
from .pointwise import PointwiseKernel
from .rowwise import CumsumKernel, HadamardKernel, ReduceKernel, SoftmaxKernel
from .state import CausalConvKernel, ChannelScanKernel, GatedScanKernel, SelectiveScanKernel

_KERNELS: dict[type[Step], type[StepKernel[Any]]] = {
    linear.Linear: LinearKernel, linear.LinearQ: LinearKernel,
    linear.ExpertLinear: ExpertLinearKernel, linear.ExpertLinearQ: ExpertLinearKernel,
    embedding.Embedding: EmbeddingKernel, embedding.SelectRows: SelectRowsKernel,
    norm.RmsNorm: NormKernel, norm.AddRmsNorm: NormKernel, norm.LayerNorm: NormKernel, norm.AddLayerNorm: NormKernel,
    rowwise.Reduce: ReduceKernel, rowwise.Softmax: SoftmaxKernel, rowwise.Cumsum: CumsumKernel,
    rowwise.Topk: TopkKernel, rowwise.Gather: GatherKernel, rowwise.Scatter: ScatterKernel, rowwise.Bmm: BmmKernel,
    rowwise.Hadamard: HadamardKernel,
    attention.KvWrite: KvWriteKernel, attention.Attention: AttentionKernel, attention.ChooseKeys: ChooseKeysKernel,
    pointwise.Pointwise: PointwiseKernel,
    state.CausalConv: CausalConvKernel, state.ChannelScan: ChannelScanKernel, state.GatedScan: GatedScanKernel,
    state.SelectiveScan: SelectiveScanKernel,
    collective.AllReduce: CollectiveKernel, collective.AllGather: CollectiveKernel,
    collective.ReduceScatter: ReduceScatterKernel, collective.GatherRows: GatherRowsKernel,
}  # fmt: skip

TRITON_KERNELS: KernelTable[type[StepKernel[Any]]] = KernelTable("Triton")
for _step, _kernel in _KERNELS.items():
    TRITON_KERNELS.register(_step, _kernel)
