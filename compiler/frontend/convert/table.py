"""Which function makes an exported op token-major: the table of handlers, one part per module of handlers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# (conversion, exported node, operands, keyword operands) -> the node's value: a Value, a list of them, or a number.
# Operands are values. ValueError with a reason refuses the op.
Handler = Callable[[Any, Any, list[Any], dict[str, Any]], Any]
Handlers = Mapping[str, Handler]


class HandlerTable(dict[str, Handler]):
    """Handlers by the name of an exported op without overload: "aten.view"."""

    def handles(self, *names: str) -> Callable[[Handler], Handler]:
        """Declare the decorated function the handler of these ops."""

        def declare(handler: Handler) -> Handler:
            for name in names:
                if name in self:
                    raise ValueError(f"{name} has two handlers")
                self[name] = handler
            return handler

        return declare


def joined(*tables: Handlers) -> Handlers:
    """One table of several; an op may be in one of them only."""
    found = HandlerTable()
    for table in tables:
        for name, handler in table.items():
            found.handles(name)(handler)
    return found
