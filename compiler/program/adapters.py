"""What the program says of its room for adapters."""

from __future__ import annotations

from torch import Tensor

from ...runtime.format.adapters import AdapterPlan, AdapterSite, Pool
from ..graph.graph import Graph
from ..weights.formats.dense import F32
from ..weights.handles import Constant
from .builder import ProgramBuilder, WeightSource
from .profile import Profile


def adapter_plan(graph: Graph, builder: ProgramBuilder, profile: Profile) -> AdapterPlan:
    """The pools and sites of a graph that was lowered; the factors of sites become weights of the program."""
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
    for site in graph.sites:
        a, b = graph.weights[site.a], graph.weights[site.b]
        slots, rank = b.shape[0] // max(site.experts, 1), b.shape[-1]
        for handle in (a, b):
            name = names[id(handle)]
            layout = builder.weights[name].layout
            _, n, k = handle.shape
            pools[name] = Pool(name, slots, max(site.experts, 1), n, k, layout.format.name, layout.tile)
        columns, rows = factors(site.parameter, "columns", site.columns), factors(site.parameter, "rows", site.rows)
        order = factors(site.parameter, "gguf_rows", site.gguf_rows)
        places = names[id(a)], names[id(b)], site.row, site.experts
        named = columns, rows, list(site.gguf), order
        sites.append(AdapterSite(site.parameter, b.shape[-2], a.shape[-1], *places, *named))
    return AdapterPlan(slots, rank, list(pools.values()), sites, graph.gguf)
