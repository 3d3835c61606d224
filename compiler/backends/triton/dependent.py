"""Programmatic dependent launch: a kernel begins while the one before it runs, and waits before it touches memory.

From sm_90 on, a launch may be told not to wait for the kernel before it on the stream (CUDA C++ programming guide,
"Programmatic Dependent Launch and Synchronization"). It then has to wait itself, `griddepcontrol.wait`, until that one
has ended and all that it wrote is seen. That is the first that a kernel does, in every program: buffers are used again,
so that even a first write would be too early, and a kernel that ended without having waited could end before the one
before it, on which others count.

The next kernel begins once every program of this one has ended or said that it may (`launch_dependents`). Kernels that
fill the device never say so: the next one's programs would take what room is left, several on one multiprocessor and
none on another, and stay there (gate and up of Llama 1B in 4 bits took 22 us so on an H100, and 10 us else). One of
few programs says so at once, and others where their template does: where only a few programs go on.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import lru_cache

from .spec import LaunchSpec

FEW = 32  # programs: so few leave the multiprocessors alike
MARK = "# the next kernel may begin"
_WAIT = "if not INTERPRETED:  # for what the last kernel wrote\n{0}    tl.extra.cuda.gdc_wait()\n"
_BEGIN = "if not INTERPRETED:\n{0}    tl.extra.cuda.gdc_launch_dependents()\n"


def dependent(spec: LaunchSpec, few: bool = False) -> LaunchSpec:
    """The spec of a kernel that may begin before the one before it has ended. few: it has at most `FEW` programs.

    A source that does not include common.py.jinja stays as it is, and its kernel waits to be launched.
    """
    if "\nINTERPRETED = " not in spec.source:
        return spec
    return replace(spec, source=_waiting(spec.source, spec.entry, few), dependent=True)


@lru_cache(maxsize=4096)
def _waiting(source: str, entry: str, few: bool) -> str:
    """The source with the wait behind the head of its kernel, and marks as calls."""
    kernels = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == entry)
    first = next(kernels).body
    at = first[1 if ast.get_docstring(ast.Module(first, [])) is not None else 0].lineno - 1
    lines = [_marked(line) for line in source.splitlines(keepends=True)]
    indent = " " * 4
    start = [indent + call.format(indent) for call in ((_BEGIN, _WAIT) if few else (_WAIT,))]
    return "".join((*lines[:at], *start, *lines[at:]))


def _marked(line: str) -> str:
    indent, mark, _ = line.partition(MARK)
    return indent + _BEGIN.format(indent) if mark else line
