"""Programmatic dependent launch: a kernel begins while the one before it ends, and waits before it touches memory.

From sm_90 on, a launch may be told not to wait for the kernel before it on the stream (CUDA C++ programming guide,
"Programmatic Dependent Launch and Synchronization"). It then has to wait itself, with `griddepcontrol.wait`, until the
earlier kernel has ended and its writes are visible. Every program of a kernel does this first: buffers are reused, so
even a first write could be too early, and a kernel that did not wait could end before the earlier one, whose end later
kernels rely on.

Decode attention lets the next kernel begin (`griddepcontrol.launch_dependents`) after its last loop, when all of its
programs are about to end; other kernels let it begin when they have ended. Products do not use the instruction: it
alone made a 4-bit step of one sequence 19 % slower on an H200, whether launches overlapped or not (Triton 3.6;
benchmarks/results/gpu-visit-h200.md), and requesting weights during the wait gained nothing in 16 bits. If the next
kernel begins together with the current one, its programs are spread unevenly over the free multiprocessors: 30 %
slower.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import lru_cache

from .spec import LaunchSpec

_NEXT = "# dependent: next"  # a comment that marks where the next kernel may begin
_CALLS = {"wait": "tl.extra.cuda.gdc_wait()", "next": "tl.extra.cuda.gdc_launch_dependents()"}


def dependent(spec: LaunchSpec) -> LaunchSpec:
    """The spec of a kernel that may begin before the one before it has ended.

    A source that does not include common.py.jinja is unchanged, and its kernel is launched after the one before it.
    """
    if "\nINTERPRETED = " not in spec.source:
        return spec
    return replace(spec, source=_waiting(spec.source, spec.entry), dependent=True)


@lru_cache(maxsize=4096)
def _waiting(source: str, entry: str) -> str:
    """The source with a wait at the beginning of the kernel's body."""
    lines = source.splitlines(keepends=True)
    kernels = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == entry)
    first = next(kernels).body
    at = first[1 if ast.get_docstring(ast.Module(first, [])) is not None else 0].lineno - 1
    return "".join([*map(_done, lines[:at]), _call("    ", "wait"), *map(_done, lines[at:])])


def _done(line: str) -> str:
    """The line, or the call that it stands for if it is a marker."""
    return _call(line.partition(_NEXT)[0], "next") if line.strip() == _NEXT else line


def _call(indent: str, said: str) -> str:
    """The lines of a call that the interpreter skips: there every kernel has ended before the next begins."""
    return f"{indent}if not INTERPRETED:\n{indent}    {_CALLS[said]}\n"
