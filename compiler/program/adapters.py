"""The program's description of its adapter slots."""

from __future__ import annotations

from torch import Tensor

from ...runtime.format.adapters import AdapterPlan, AdapterSite, Pool
from ..graph.graph import Graph
from ..weights.formats.dense import F32
from ..weights.handles import Constant, RowConcat
from ..weights.pool import AdapterPool, PoolSite
from .builder import ProgramBuilder, WeightSource
from .profile import Profile


def adapter_plan(graph: Graph, builder: ProgramBuilder, profile: Profile) -> AdapterPlan:
    """The pools and sites of a lowered graph; the factors of sites become weights of the program."""
    names = {id(source.handle): name for name, source in builder.weights.items()}

    def factors(site: str, kind: str, value: Tensor | None) -> str:
        if value is None:
            return ""
        handle = Constant(value.float())
        layout = profile.layout(F32, "plain")
        return builder.weight(f"adapters.{site}.{kind}", WeightSource(handle, layout, handle.shape)).name

    sites: list[AdapterSite] = []
    pools: dict[str, Pool] = {}
    slots = rank = 0

    def pool(name: str) -> str:
        """The program's name of a pool, which the plan lists."""
        if not name:
            return ""
        handle = graph.weights[name]
        assert isinstance(handle, AdapterPool)
        own = names[id(handle)]
        layout = builder.weights[own].layout
        cut = handle.cut
        axis, cuts = (0, []) if cut is None else (cut.axis, [list(ranges) for ranges in cut.cuts])
        facts = layout.format.name, layout.tile, handle.first
        pools[own] = Pool(own, handle.slots, *handle.part, *facts, axis, cuts)
        return own

    for site in graph.sites:
        handle = graph.weights[site.b]
        assert isinstance(handle, AdapterPool)
        slots, rank = handle.slots, handle.shape[-1]
        called = site.parameter
        base, base_row = _base(site, builder)
        n, k = site.shape[-2:]
        base_axis, base_cuts = (0, ()) if site.base_cut is None or not base else site.base_cut
        sites.append(
            AdapterSite(
                called, n, k, pool(site.a), pool(site.b), site.row, site.experts,
                columns=factors(called, "columns", site.columns), rows=factors(called, "rows", site.rows),
                gguf=list(site.gguf), gguf_rows=factors(called, "gguf_rows", site.gguf_rows), table=site.table,
                tied=site.tied, bias=pool(site.bias), gain=pool(site.gain), base=base, base_row=base_row,
                base_axis=base_axis, base_cuts=[list(ranges) for ranges in base_cuts],
                base_bias=factors(called, "own_bias", None if site.own_bias is None else site.own_bias.load()),
            )
        )  # fmt: skip
    return AdapterPlan(slots, rank, list(pools.values()), sites, graph.gguf)


def _base(site: PoolSite, builder: ProgramBuilder) -> tuple[str, int]:
    """The weight of the program with a site's values, and the first of its rows; "" if there is no such weight, for
    instance because its columns lie in another order."""
    for name, source in builder.weights.items() if site.base is not None else ():
        pieces = source.handle.pieces if isinstance(source.handle, RowConcat) else (source.handle,)
        row = 0
        for piece in pieces:
            if piece is site.base:
                return name, row
            row += piece.shape[0]
    return "", 0
