"""Programmatic dependent launch: a kernel begins while the one before it runs, and waits before it touches memory.

From sm_90 on, a launch may be told not to wait for the kernel before it on the stream (CUDA C++ programming guide,
"Programmatic Dependent Launch and Synchronization"). It then has to wait itself, `griddepcontrol.wait`, until that one
has ended and all that it wrote is seen; what lets the next kernel begin is `griddepcontrol.launch_dependents`. Both are
the first that a kernel does, in every program: buffers are used again, so that even a first write would be too early,
and a kernel that ended without having waited could end before the one before it, on which others count.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import lru_cache

from .spec import LaunchSpec

_CALLS = """\
    if not INTERPRETED:  # the next kernel may begin; what the last one wrote is there
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
"""


def dependent(spec: LaunchSpec) -> LaunchSpec:
    """The spec of a kernel that may begin before the one before it has ended.

    A source that does not include common.py.jinja stays as it is, and its kernel waits to be launched.
    """
    if "\nINTERPRETED = " not in spec.source:
        return spec
    return replace(spec, source=_waiting(spec.source, spec.entry), dependent=True)


@lru_cache(maxsize=4096)
def _waiting(source: str, entry: str) -> str:
    """The source with the calls behind the head of its kernel."""
    kernels = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == entry)
    first = next(kernels).body
    at = first[1 if ast.get_docstring(ast.Module(first, [])) is not None else 0].lineno - 1
    lines = source.splitlines(keepends=True)
    return "".join((*lines[:at], _CALLS, *lines[at:]))
