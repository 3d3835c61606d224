"""Protocols for the fields that several kinds of requests share."""

from __future__ import annotations

from typing import Protocol, TypeVar


class OfModel(Protocol):
    """A request that names its model."""

    @property
    def model(self) -> str:
        """The name; "" for the served model."""
        ...


class Asking(OfModel, Protocol):
    """A request whose prompts are only read: nothing is generated."""

    @property
    def priority(self) -> int:
        """Smaller is served first."""
        ...

    @property
    def deadline(self) -> float | None:
        """Seconds after which the request ends; None for no deadline of its own."""
        ...


R = TypeVar("R", bound=OfModel)
