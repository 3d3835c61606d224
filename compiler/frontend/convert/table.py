"""The table of handlers that make exported ops token-major, by op names without overload such as "aten.view"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ...handlers import HandlerTable

# (conversion, exported node, operands, keyword operands) -> what the node becomes: a TracedValue, a list of them, or a
# number. Operands are such values. ValueError with a reason refuses the op.
Handler: TypeAlias = Callable[[Any, Any, list[Any], dict[str, Any]], Any]
Handlers: TypeAlias = Mapping[str, Handler]
Table: TypeAlias = HandlerTable[Handler]

DECLARED = "elementwise"
"""The name of the handler for elementwise ops of other packages, which the model's code calls."""
