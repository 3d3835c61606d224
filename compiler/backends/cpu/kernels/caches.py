"""The KV formats that the CPU backend has. Another package adds its own with `CPU_CACHES.register`."""

from __future__ import annotations

from dataclasses import dataclass

from .....runtime.format.kv import KVLayer
from ...cache_table import CacheTable


@dataclass(frozen=True)
class CacheType:
    """A C++ type of the elements of a cache. integer: its codes are multiplied as 16-bit integers.

    header: a file of templates (`add_templates`) under cpp/ that declares the type if kv.h does not, a struct of one
    byte with `vload` and `vload_n` (the floats of sixteen codes, or of the first n), and defines how a float becomes a
    code: `Coding<T>` with a scale per vector, or `assign` and an `is_scaled<T>()` that is false. "" for none.
    """

    ctype: str
    integer: bool = False
    header: str = ""

    def refusal(self, layer: KVLayer) -> str:
        """Always "": any layer can be cached in this format."""
        return ""


CPU_CACHES: CacheTable[CacheType] = CacheTable("CPU")
_KINDS = {
    "f32": CacheType("float"), "bf16": CacheType("Bf16"), "f16": CacheType("Half"),
    "i8": CacheType("int8_t", integer=True), "f8": CacheType("FiniteE4m3"),
    "i4": CacheType("I4", integer=True), "i2": CacheType("I2", integer=True),
}  # fmt: skip
for _name, _kind in _KINDS.items():
    CPU_CACHES.register(_name, _kind)
