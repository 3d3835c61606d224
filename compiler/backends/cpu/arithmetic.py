"""How micro-kernels multiply codes by int8 activations, and in how many bits they sum the products: one kind per
kernel."""

from __future__ import annotations

from enum import StrEnum


class Arithmetic(StrEnum):
    """The integer sums of all kinds are exact and groups are summed as floats in one order, so all kinds give the same
    bits.

    QUADS: an instruction sums the products of four k in 32 bits. PAIRS: codes and activations are widened to 16 bits,
    and an instruction sums the products of two k in 32 bits. CHAINS: the products of eight k are summed in 16 bits
    first. LONG_CHAINS: the products of 32 k of 4-bit codes are. SHORT: as many products of a block format as 16 bits
    can hold are. MATRICES: instructions multiply matrices of eight k (smmla). TILES: they multiply tiles of sixteen
    rows (AMX).
    """

    QUADS = "quads"
    PAIRS = "pairs"
    CHAINS = "chains"
    LONG_CHAINS = "long_chains"
    SHORT = "short"
    MATRICES = "matrices"
    TILES = "tiles"

    @property
    def template(self) -> str:
        """The template of its micro-kernels, relative to codegen_templates."""
        return f"cpp/linear/micro_{_TEMPLATES.get(self, 'quant')}.cpp.jinja"


_TEMPLATES = {
    Arithmetic.CHAINS: "chain",
    Arithmetic.SHORT: "short",
    Arithmetic.MATRICES: "matrix",
    Arithmetic.TILES: "amx",
}
