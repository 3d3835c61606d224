"""`--quant auto`: how many bytes the weights may take, and the pass that spends them."""

from __future__ import annotations

from collections.abc import Sequence

from ..passes import pipelines
from ..passes.base import Pass, PassContext
from ..passes.manager import run_passes
from ..passes.quantize.auto import QuantizeAuto, Role
from ..passes.quantize.rotate import Rotate
from .backends.base import Backend
from .errors import UnsupportedModel
from .graph.graph import Graph
from .options import CompileOptions
from .program.layout import MatrixLayout
from .program.lower import LowerOptions, lower
from .weights.formats.base import StorageFormat

DEFAULT_BITS = 4.5


def byte_budget(options: CompileOptions, graph: Graph) -> int:
    """The bytes that all weights of the engine may take."""
    if options.size is not None:
        return options.size
    return int((options.bits or DEFAULT_BITS) * graph.info.num_parameters / 8)


def auto_passes(
    options: CompileOptions, graph: Graph, backend: Backend, kv_dtype: str, sequences: Sequence[Sequence[int]]
) -> list[Pass]:
    """The pass that chooses a format for each weight of `graph` and rounds to it, after a rotation if --rotate asks for
    one."""

    def stored(form: StorageFormat, shape: Sequence[int], role: Role) -> int | None:
        try:
            layout = backend.profile.layout(form, role)
        except UnsupportedModel:
            return None
        if isinstance(layout, MatrixLayout) and layout.misfit(*shape[-2:]):
            return None
        return layout.nbytes(shape)

    rotations = rotated(options)
    unlimited = [*rotations, QuantizeAuto(keep=options.keep, stored=stored, searches=False)]
    fixed = _fixed_bytes(unlimited, graph, backend, kv_dtype)
    chosen = QuantizeAuto(
        keep=options.keep, sequences=sequences, budget=byte_budget(options, graph), fixed=fixed, stored=stored
    )
    return pipelines.ordered([*rotations, chosen], pipelines.canonicalize())


def rotated(options: CompileOptions) -> list[Pass]:
    """The passes that --rotate puts before the pass that chooses."""
    return [Rotate(format=QuantizeAuto.format, keep=options.keep, required=True)] if options.rotate else []


def _fixed_bytes(unlimited: list[Pass], graph: Graph, backend: Backend, kv_dtype: str) -> int:
    """Bytes of the weights for which no format is chosen: norms, biases, position tables, kept weights. Found by
    lowering a copy of the graph whose other weights have any format; no weight is read."""
    probe, context = graph.copy(), PassContext()
    for phase in (unlimited, pipelines.attention(), pipelines.fuse()):
        run_passes(probe, phase, context)
    program = lower(probe, LowerOptions(kv_dtype, backend.profile, max_seq_len=graph.max_seq_len)).program
    assert context.allocation is not None
    chosen = sum(option.nbytes for option in context.allocation.options)
    return max(0, sum(weight.nbytes for weight in program.weights.values()) - chosen)
