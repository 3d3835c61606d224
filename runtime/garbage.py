"""Python's garbage collector in processes that run for days."""

import gc

_THRESHOLDS = (700, 10, 10)  # Python's own; commands start with larger ones (cli/group.py)


def settle() -> None:
    """Call this once, when a process begins to serve: what exists now lives on, and collections no longer examine it.

    The second collection finds nothing to examine. Without it, Python would wait with the next full collection until a
    quarter as many objects as were frozen have become garbage, which is megabytes.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
    gc.set_threshold(*_THRESHOLDS)
