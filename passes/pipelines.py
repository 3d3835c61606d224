"""The compile as a list of passes, in phases. Each phase is checked against what the phases before it ensure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..compiler.adapter_slots import AdapterSlots
from ..compiler.eviction import Eviction
from ..compiler.quantization import find_quantization, head_format
from .attention.absorb_projections import AbsorbProjections
from .attention.evict import Evict
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
from .drafting import PREFIX as LAYER_PREFIX
from .fuse.add_norm import FuseAddNorm
from .fuse.fuse_pointwise import FusePointwise
from .fuse.merge_linears import MergeLinears
from .fuse.sort_columns import SortColumns
from .manager import check_order
from .speculate.insert_draft_layer import DraftLayer, InsertDraftLayer


def canonicalize() -> list[Pass]:
    """Passes to the canonical form, in which each thing is written in one way; quantization reads this form."""
    return ordered(
        [
            DeadCode(),
            FoldConstants(),
            Simplify(),
            EliminateCommon(),
            PositionTables(),
            RecognizeNorms(),
            AbsorbProjections(),
            FoldConstants(),
            Simplify(),
            EliminateCommon(),
        ]
    )


def packages(passes: list[Pass]) -> list[Pass]:
    """`passes` of --passes, followed by passes that restore the canonical form; empty if there are none. PassError if
    one requires a fact that `canonicalize` does not ensure."""
    return ordered([*passes, FoldConstants(), Simplify(), EliminateCommon()], canonicalize()) if passes else []


def attention(policy: Eviction | None = None) -> list[Pass]:
    """Attention over the paged cache. policy: which tokens the cache keeps (--kv-policy); None keeps all."""
    evicting: list[Pass] = [] if policy is None else [Evict(policy)]
    paged = [RecognizeRope(), FoldConstants(), Simplify(), PagedAttention(), *evicting, SelectLogitRows()]
    return ordered(paged, canonicalize())


def fuse() -> list[Pass]:
    """Fewer, larger kernels; afterwards the graph holds only ops of the dialect."""
    return ordered(
        [
            SortColumns(),
            MergeLinears(),
            FuseAddNorm(),
            FoldConstants(),
            Simplify(merge_slices=True),
            EliminateCommon(),
            FusePointwise(),
        ],
        [*canonicalize(), *attention()],
    )


def parallel(
    tensors: int, experts: int, stages: int = 1, cost: Callable[..., float] | None = None, rows: bool = False
) -> list[Pass]:
    """Divide columns, heads and vocabulary among `tensors` ranks, whole experts among `experts` ranks, and layers into
    `stages` by the cost of calls (None: the bytes of their weights); empty for one rank. rows: divide work that ranks
    would repeat by rows."""
    found: list[Pass] = []
    if (ranks := max(tensors, experts)) > 1:
        from .parallel.divide import DivideAmongRanks
        from .parallel.sequence import DivideRows

        found += [DivideAmongRanks(ranks, tensors > 1, experts > 1), *([DivideRows()] if rows else [])]
    if stages > 1:
        from .parallel.stages import CutIntoStages, stored_bytes

        found.append(CutIntoStages(stages, cost or stored_bytes))
    return ordered(found, [*canonicalize(), *attention()])


def adapters(slots: AdapterSlots) -> list[Pass]:
    """Adapter slots, in a copy of the quantized graph after `attention`, which runs if requests of a batch use
    adapters."""
    from .adapters.insert import InsertAdapters

    return ordered([InsertAdapters(slots)], [*canonicalize(), *attention()])


def speculate(
    heads: Sequence[Any], layers: int, quant: str, head: str, draft_layer: DraftLayer | None = None
) -> list[Pass]:
    """Draft heads, an early exit after `layers` layers, or a draft layer; an empty list, 0 and None for no such part.

    These passes run before attention and fusion, which then treat the new parts like the rest of the graph, and after
    quantization, so that the model is quantized as without them; the new parts are quantized here, without calibration.
    """
    if layers:
        from .speculate.insert_early_exit import InsertEarlyExit

        return ordered([InsertEarlyExit(layers)], canonicalize())
    if not heads and draft_layer is None:
        return []
    from .quantize.rtn import QuantizeRtn
    from .speculate import insert_medusa_heads

    inserted: list[Pass] = [insert_medusa_heads.InsertMedusaHeads(tuple(heads))]
    prefix = insert_medusa_heads.PREFIX
    if draft_layer is not None:
        inserted = [InsertDraftLayer(draft_layer)]
        prefix = LAYER_PREFIX
    chosen = find_quantization(quant)
    if chosen is not None:
        inserted.append(QuantizeRtn(format=chosen.format, head=head_format(head), only=f"{prefix}."))
    return ordered(inserted, canonicalize())


def quantize(
    quant: str,
    head: str,
    keep: tuple[str, ...],
    calibration: Sequence[Sequence[int]],
    group: int | None = None,
    device: str = "cpu",
    plans: bool = False,
    rotate: bool = False,
    encodes: bool = False,
    cpu: bool = False,
) -> list[Pass]:
    """The quantization passes for --quant and its related options; empty for "none".

    calibration: token sequences, for calibrated methods. group: values per scale; None: the default. plans: only give
    the graph its final form; nothing is read or computed. encodes: the engine is for CPUs and always computes many
    tokens at a time, for which methods may have other formats. cpu: the engine is for CPUs.
    """
    from .quantize.awq import QuantizeAwq
    from .quantize.gptq import QuantizeGptq
    from .quantize.rotate import Rotate
    from .quantize.rtn import QuantizeRtn
    from .quantize.smooth import QuantizeSmooth

    chosen = find_quantization(quant)
    if chosen is None:
        return []
    form = chosen.stored(cpu, encodes)
    options: dict[str, Any] = {"format": form, "head": head_format(head), "keep": keep}
    if group is not None:
        options |= {"group": group, "any_group": False}
    reads: dict[str, Any] = {"sequences": calibration, "device": device} if chosen.calibrated else {}
    better: dict[str, Any] = {"sweeps": 8} if chosen.method == "awq+gptq" else {}
    # AWQ nearly always also scales values between linears: a plan has some scale there
    searches: dict[str, Any] = {"searches": not plans, **reads}
    passes: dict[str, Callable[[], list[Pass]]] = {
        "rtn": lambda: [QuantizeRtn(**options)],
        "awq": lambda: [QuantizeAwq(**options, **searches)],
        "smooth": lambda: [QuantizeSmooth(**options, **searches)],
        "gptq": lambda: [QuantizeRtn(**options) if plans else QuantizeGptq(**options, **reads, **better)],
        "awq+gptq": lambda: [
            QuantizeAwq(**{**options, "head": None}, **searches, rounds=False, for_gptq=True),
            *passes["gptq"](),
        ],
    }
    table = head_format(head) if head_format(head) == "q8" else None
    rotations: list[Pass] = [Rotate(**options, table=table, required=True)] if rotate else []
    return ordered([*rotations, *passes[chosen.method]()], canonicalize())


def ordered(passes: list[Pass], before: Sequence[Pass] = ()) -> list[Pass]:
    """`passes`, which may rely on the facts that `before` ensures; PassError if one requires more."""
    check_order(passes, check_order(before))
    return passes
