"""np: numpy, imported when one of its attributes is first used.

numpy is the slowest import when an engine starts, and greedy decoding on CPUs does not need it.

    if TYPE_CHECKING:
        import numpy as np
    else:
        from .late import np
"""

from __future__ import annotations

from typing import Any


class _Numpy:
    """Stands for numpy; attributes are cached here after their first use."""

    def __getattr__(self, name: str) -> Any:
        import numpy

        found = getattr(numpy, name)
        setattr(self, name, found)
        return found


np: Any = _Numpy()
