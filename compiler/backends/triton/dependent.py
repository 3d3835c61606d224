"""Programmatic dependent launch: a kernel begins while the one before it ends, and waits before it touches memory.

From sm_90 on, a launch may be told not to wait for the kernel before it on the stream (CUDA C++ programming guide,
"Programmatic Dependent Launch and Synchronization"). It then has to wait itself, `griddepcontrol.wait`, until that one
has ended and all that it wrote is seen. That is the first that a kernel does, in every program: buffers are used again,
so that even a first write would be too early, and a kernel that ended without having waited could end before the one
before it, on which others count.

Products of few rows and attention of decodes let the next kernel begin (`griddepcontrol.launch_dependents`) behind
their last loop, when all of their programs are about to end; others let it begin when they have ended. On an H100 that
is worth 1.7 % of a 4-bit step of one sequence, 0.4 % of a 16-bit one. Begun with this one, the next one's programs lie
unevenly on the multiprocessors that are free: 30 % slower. What has begun may ask for weights to come near before it
waits, for no kernel writes them: worth 0.7 % more where they are dense (benchmarks/NOTES.md).
"""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import lru_cache

from .spec import LaunchSpec

_MARK = "# dependent: "  # a comment behind which stands what only such kernels do
_WAIT = f"{_MARK}wait\n"
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
    """The source whose kernel waits: where it says so, or else behind its head."""
    lines = source.splitlines(keepends=True)
    if _WAIT not in source:
        kernels = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == entry)
        first = next(kernels).body
        at = first[1 if ast.get_docstring(ast.Module(first, [])) is not None else 0].lineno - 1
        lines.insert(at, "    " + _WAIT)
    return "".join(map(_done, lines))


def _done(line: str) -> str:
    """A marked line as what it says, but in the interpreter, where every kernel has ended before the next begins."""
    indent, mark, said = line.rstrip("\n").partition(_MARK)
    return f"{indent}if not INTERPRETED:\n{indent}    {_CALLS.get(said, said)}\n" if mark else line
