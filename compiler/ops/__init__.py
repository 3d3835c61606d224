"""The icc dialect. Importing this package registers every op with torch as `torch.ops.icc.<name>`."""

from . import attention, embedding, linear, norm, pointwise, rowwise
from .base import OPS, Cost, Op

__all__ = ["OPS", "Cost", "Op", "attention", "embedding", "linear", "norm", "pointwise", "rowwise"]
