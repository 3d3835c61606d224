"""Which Triton kernel implements each op of a program."""

from __future__ import annotations

from ..spec import TritonKernel
from .attention import Attention
from .bmm import BMM
from .index import INDEXED
from .kv_cache import KvWrite
from .linear import LINEARS
from .norm import NORMS
from .pointwise import Pointwise
from .rowwise import ROWWISE

KERNELS: dict[str, type[TritonKernel]] = {
    **BMM, **INDEXED, **LINEARS, **NORMS, **ROWWISE,
    "pointwise": Pointwise, "kv_write": KvWrite, "attention": Attention,
}  # fmt: skip
