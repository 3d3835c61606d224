"""Programmatic dependent launch: a kernel begins while the one before it ends, and waits before it touches memory.

From sm_90 on, a launch may be told not to wait for the kernel before it on the stream (CUDA C++ programming guide,
"Programmatic Dependent Launch and Synchronization"). It then has to wait itself, `griddepcontrol.wait`, until that one
has ended and all that it wrote is seen. That is the first that a kernel does, in every program: buffers are used again,
so that even a first write would be too early, and a kernel that ended without having waited could end before the one
before it, on which others count.

Attention of decodes lets the next kernel begin (`griddepcontrol.launch_dependents`) behind its last loop, when all of
its programs are about to end; others let it begin when they have ended. Products do not say it: in their code the
instruction alone made a 4-bit step of one sequence 19 % slower on an H200, launches that overlap or not (Triton 3.6;
benchmarks/results/gpu-visit-h200.md), and asking for weights while they wait brought nothing in 16 bits. Begun with
this one, the next one's programs lie unevenly on the multiprocessors that are free: 30 % slower.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import lru_cache

from .spec import LaunchSpec

_NEXT = "# dependent: next"  # a comment: here the next kernel may begin
_CALLS = {"wait": "tl.extra.cuda.gdc_wait()", "next": "tl.extra.cuda.gdc_launch_dependents()"}


def dependent(spec: LaunchSpec) -> LaunchSpec:
    """The spec of a kernel that may begin before the one before it has ended.

    A source that does not include common.py.jinja stays as it is, and its kernel waits to be launched.
    """
    if "\nINTERPRETED = " not in spec.source:
        return spec
    return replace(spec, source=_waiting(spec.source, spec.entry), dependent=True)


@lru_cache(maxsize=4096)
def _waiting(source: str, entry: str) -> str:
    """The source whose kernel waits behind its head."""
    lines = source.splitlines(keepends=True)
    kernels = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == entry)
    first = next(kernels).body
    at = first[1 if ast.get_docstring(ast.Module(first, [])) is not None else 0].lineno - 1
    return "".join([*map(_done, lines[:at]), _call("    ", "wait"), *map(_done, lines[at:])])


def _done(line: str) -> str:
    """A marked line as what it says."""
    return _call(line.partition(_NEXT)[0], "next") if line.strip() == _NEXT else line


def _call(indent: str, said: str) -> str:
    """But in the interpreter, where every kernel has ended before the next begins."""
    return f"{indent}if not INTERPRETED:\n{indent}    {_CALLS[said]}\n"
