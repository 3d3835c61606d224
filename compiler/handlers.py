"""Tables of handlers: the function that handles each op; each module of handlers has one part of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Handler = TypeVar("Handler", bound=Callable[..., object])


class HandlerTable(dict[str, Handler]):
    """Handlers by the name of an op."""

    def handles(self, *names: str) -> Callable[[Handler], Handler]:
        """Declare the decorated function the handler of these ops."""

        def declare(handler: Handler) -> Handler:
            for name in names:
                if name in self:
                    raise ValueError(f"{name} has two handlers")
                self[name] = handler
            return handler

        return declare


def joined(*tables: Mapping[str, Handler]) -> HandlerTable[Handler]:
    """Merge several tables into one; an op may be in only one of them."""
    found: HandlerTable[Handler] = HandlerTable()
    for table in tables:
        for name, handler in table.items():
            found.handles(name)(handler)
    return found
