"""The KV formats that the Triton backend has. Another package adds its own with `TRITON_CACHES.register`."""

from __future__ import annotations

from dataclasses import dataclass

from .....runtime.format.kv import KVLayer
from ...cache_table import CacheTable

KV_ALIGN = 16  # bytes of one copy to shared memory: each key and value takes a multiple
LONG = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


@dataclass(frozen=True)
class CacheElements:
    """How kernels read a page: as elements of the Triton type `element`.

    product: the Triton type in which elements are multiplied; "" for codes, which are converted to the type of the
    queries. macros: a template with two macros. `unpack` is the body of the Triton function `numbers` (the floats that
    codes stand for, without scales); `pack` defines `quantize` (codes of float32 rows, with scales if any), or `pack`
    of packed codes. "" for floats, which are stored without conversion.
    """

    element: str
    product: str = ""
    macros: str = ""

    def refusal(self, layer: KVLayer) -> str:
        """Why a layer's pages cannot be read in this way; "" if they can."""
        if layer.align % KV_ALIGN:
            return f"vectors of the cache begin at multiples of {layer.align} bytes, not of {KV_ALIGN}"
        return "tokens chosen by their attention: there are no kernels for GPUs" if layer.scored else ""


TRITON_CACHES: CacheTable[CacheElements] = CacheTable("Triton")
_KINDS = {
    "f32": CacheElements("fp32", "float32"), "bf16": CacheElements("bf16", "bfloat16"),
    "f16": CacheElements("fp16", "float16"),
    "i8": CacheElements("i8", macros="triton/kv/int8.py.jinja"),
    "f8": CacheElements("u8", macros="triton/kv/float8.py.jinja"),
    "i4": CacheElements("u8", macros="triton/kv/mixed4.py.jinja"),
    "i2": CacheElements("u8", macros="triton/kv/mixed2.py.jinja"),
}  # fmt: skip
for _name, _kind in _KINDS.items():
    TRITON_CACHES.register(_name, _kind)
