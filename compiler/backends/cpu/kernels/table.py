"""Which CPU kernel implements each op."""

from __future__ import annotations

from typing import Any

from ....program.steps.attention import Attention, ChooseKeys, KvWrite
from ....program.steps.base import Step
from ....program.steps.collective import AllGather, AllReduce, GatherRows, ReduceScatter, Transfer
from ....program.steps.embedding import Embedding, SelectRows
from ....program.steps.linear import ExpertLinear, ExpertLinearQ, Linear, LinearQ, QuantizeRows
from ....program.steps.pointwise import Pointwise
from ....program.steps.rowwise import Bmm, Cumsum, Gather, Hadamard, Reduce, Scatter, Softmax, Topk
from ....program.steps.state import CausalConv, ChannelScan, GatedScan, SelectiveScan
from ...kernel_table import KernelTable
from .attention import AttentionParams, ChooseKeysParams, KvWriteParams
from .base import KernelParams
from .collective import AllGatherParams, AllReduceParams, GatherRowsParams, ReduceScatterParams, TransferParams
from .embedding import EmbeddingParams, SelectRowsParams
from .linear import ExpertLinearParams, ExpertLinearQParams, LinearParams, LinearQParams, QuantizeRowsParams
from .norm import NORMS
from .pointwise import PointwiseParams
from .rowwise import (
    BmmParams,
    CumsumParams,
    GatherParams,
    HadamardParams,
    ReduceParams,
    ScatterParams,
    SoftmaxParams,
    TopkParams,
)
from .state import CausalConvParams, ChannelScanParams, GatedScanParams, SelectiveScanParams

_KERNELS: dict[type[Step], type[KernelParams[Any]]] = {
    Linear: LinearParams, LinearQ: LinearQParams, QuantizeRows: QuantizeRowsParams,
    ExpertLinear: ExpertLinearParams, ExpertLinearQ: ExpertLinearQParams,
    Embedding: EmbeddingParams, SelectRows: SelectRowsParams,
    Reduce: ReduceParams, Softmax: SoftmaxParams, Cumsum: CumsumParams, Topk: TopkParams, Gather: GatherParams,
    Scatter: ScatterParams, Bmm: BmmParams, Hadamard: HadamardParams,
    KvWrite: KvWriteParams, Attention: AttentionParams, ChooseKeys: ChooseKeysParams,
    Pointwise: PointwiseParams, **NORMS,
    AllReduce: AllReduceParams, AllGather: AllGatherParams, Transfer: TransferParams,
    ReduceScatter: ReduceScatterParams, GatherRows: GatherRowsParams,
    CausalConv: CausalConvParams, ChannelScan: ChannelScanParams, GatedScan: GatedScanParams,
    SelectiveScan: SelectiveScanParams,
}  # fmt: skip

CPU_KERNELS: KernelTable[type[KernelParams[Any]]] = KernelTable("CPU")
for _step, _kernel in _KERNELS.items():
    CPU_KERNELS.register(_step, _kernel)
