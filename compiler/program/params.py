"""Values in the params of a kernel: what program.json holds of them, and what the back ends take.

A body is text in program.json, and nowhere else behind the lowering.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...runtime.format.program import Kernel, Param
from ..ops.body import Body
from .strides import normalize

_BODIES = ("body", "epilogue")


def written(params: Mapping[str, Any]) -> dict[str, Param]:
    """As program.json holds them."""
    return {name: _plain(value) for name, value in params.items()}


def _plain(value: Any) -> Param:
    if isinstance(value, Body):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def read(kernel: Kernel) -> dict[str, Any]:
    """As the back ends take them: bodies as values, lists as tuples, the walk of an elementwise kernel in normal form.

    ValueError says what cannot be read.
    """
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in kernel.params.items()}
    values |= {name: Body.parse(values[name]) for name in _BODIES if name in values}
    if kernel.op == "pointwise":
        try:
            shape, walks = normalize(values["shape"], (*values["inputs"], values["output"]))
        except KeyError as error:
            raise ValueError(f"param {error.args[0]!r} is missing") from None
        values |= {"shape": shape, "inputs": walks[:-1], "output": walks[-1]}
    return values
