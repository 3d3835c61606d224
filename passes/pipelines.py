"""The compile as a list of passes, in phases. Each phase is checked against what the phases before it ensure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .attention.paged_attention import PagedAttention
from .attention.recognize_rope import RecognizeRope
from .attention.select_logit_rows import SelectLogitRows
from .base import Pass
from .canonicalize.dead_code import DeadCode
from .canonicalize.eliminate_common import EliminateCommon
from .canonicalize.fold_constants import FoldConstants
from .canonicalize.position_tables import PositionTables
from .canonicalize.recognize_norms import RecognizeNorms
from .canonicalize.simplify import Simplify
from .fuse.add_norm import FuseAddNorm
from .fuse.fuse_pointwise import FusePointwise
from .fuse.merge_linears import MergeLinears
from .manager import check_order


def canonicalize() -> list[Pass]:
    """One way to write each thing; the form that quantization reads."""
    return _ordered(
        [
            DeadCode(),
            FoldConstants(),
            Simplify(),
            EliminateCommon(),
            PositionTables(),
            RecognizeNorms(),
            FoldConstants(),
            Simplify(),
            EliminateCommon(),
        ]
    )


def attention() -> list[Pass]:
    """Attention over the paged cache."""
    return _ordered([RecognizeRope(), FoldConstants(), Simplify(), PagedAttention(), SelectLogitRows()], canonicalize())


def fuse() -> list[Pass]:
    """Fewer, larger kernels; afterwards the graph holds only ops of the dialect."""
    return _ordered(
        [
            MergeLinears(),
            FuseAddNorm(),
            FoldConstants(),
            Simplify(merge_slices=True),
            EliminateCommon(),
            FusePointwise(),
        ],
        [*canonicalize(), *attention()],
    )


def speculate(heads: Sequence[Any], layers: int, method: str, head: str) -> list[Pass]:
    """Draft heads, or an early exit behind `layers` layers, if they are wanted.

    They come before attention and fusion, which then treat them like the rest of the graph, and after quantization,
    which leaves the model as it is without them; so heads are quantized here, without calibration.
    """
    if layers:
        from .speculate.insert_early_exit import InsertEarlyExit

        return _ordered([InsertEarlyExit(layers)], canonicalize())
    if not heads:
        return []
    from .quantize.rtn import QuantizeRtn
    from .speculate.insert_medusa_heads import PREFIX, InsertMedusaHeads

    rounded: list[Pass] = [] if method == "none" else [QuantizeRtn(head=head, only=f"{PREFIX}.")]  # type: ignore[arg-type]
    return _ordered([InsertMedusaHeads(tuple(heads)), *rounded], canonicalize())


def quantize(method: str, head: str, keep: tuple[str, ...], calibration: Sequence[Sequence[int]]) -> list[Pass]:
    """Weights to 4 bits by `method`; empty for "none"."""
    options: dict[str, Any] = {"head": head, "keep": keep}
    if method == "rtn4":
        from .quantize.rtn import QuantizeRtn

        return _ordered([QuantizeRtn(**options)], canonicalize())
    if method == "awq4":
        from .quantize.awq import QuantizeAwq

        return _ordered([QuantizeAwq(sequences=calibration, **options)], canonicalize())
    if method == "gptq4":
        from .quantize.gptq import QuantizeGptq

        return _ordered([QuantizeGptq(sequences=calibration, **options)], canonicalize())
    return []


def _ordered(passes: list[Pass], before: Sequence[Pass] = ()) -> list[Pass]:
    """`passes`, which may rely on what `before` ensures; PassError where one requires more."""
    check_order(passes, check_order(before))
    return passes
