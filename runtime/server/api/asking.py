"""What requests of several kinds have, whatever else they ask for."""

from __future__ import annotations

from typing import Protocol, TypeVar


class OfModel(Protocol):
    """A request that names its model."""

    @property
    def model(self) -> str:
        """The name; "" for the one that is served."""
        ...


class Asking(OfModel, Protocol):
    """A request of which something is only read."""

    @property
    def priority(self) -> int:
        """Smaller is served first."""
        ...

    @property
    def deadline(self) -> float | None:
        """Seconds after which it ends; None where it does not say."""
        ...


R = TypeVar("R", bound=OfModel)
