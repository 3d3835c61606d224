"""np: numpy, imported when something of it is first used.

numpy is the largest import of an engine's start, and greedy decoding on CPUs does not need it.

    if TYPE_CHECKING:
        import numpy as np
    else:
        from .late import np
"""

from __future__ import annotations

from typing import Any


class _Numpy:
    """What numpy has, kept here once it was asked for."""

    def __getattr__(self, name: str) -> Any:
        import numpy

        found = getattr(numpy, name)
        setattr(self, name, found)
        return found


np: Any = _Numpy()
