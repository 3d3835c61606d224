"""What makes an exported op token-major: handlers by the name of an exported op without overload, "aten.view"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ...handlers import HandlerTable

# (conversion, exported node, operands, keyword operands) -> the node's value: a Value, a list of them, or a number.
# Operands are values. ValueError with a reason refuses the op.
Handler: TypeAlias = Callable[[Any, Any, list[Any], dict[str, Any]], Any]
Handlers: TypeAlias = Mapping[str, Handler]
Table: TypeAlias = HandlerTable[Handler]
