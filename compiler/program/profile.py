"""What the lowering must know of a backend: how it stores values, and what its kernels can do beside their op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PackedBytes = Callable[[str, tuple[int, ...], int], int]


@dataclass(frozen=True)
class Profile:
    """One backend's storage. Formats are named as the backend's packing names them.

    dense: format of a dense matrix of an element type, e.g. "tile_{}" or "{}". quant: of a quantized one by its bits,
    e.g. "q{}". packed_nbytes(format, shape, group): size of a packed weight. activation: element type of what matrix
    products and attention read or write; everything else is float32. int8_activations: whether quantized products read
    rows of int8. epilogues: whether products can end in a pointwise body. by_alignment: whether kernels are made for
    the alignment of their operands. screened: format of an 8-bit head, of `screened_bytes` of codes or more, whose
    product screens the logits of greedy batches; "" where none does.
    """

    dense: str
    quant: str
    packed_nbytes: PackedBytes
    activation: str = "f32"
    int8_activations: bool = False
    quantized_tables: bool = False
    epilogues: bool = False
    by_alignment: bool = False
    screened: str = ""
    screened_bytes: int = 0
