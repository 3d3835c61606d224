"""The rendered text of every Triton template at small params, as files: what a change of a template or its params does.

After a change on purpose: ICC_UPDATE_GOLDEN=1 python -m pytest tests/triton/test_triton_snapshots.py, and review the
diff like code. A file begins with the launch: arguments ("?": of any alignment), grid, warps and stages. Shared parts
without params are verbatim in the sources, and only named here.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest
from icc.compiler.backends.render import TEMPLATES, render
from icc.compiler.backends.triton.dependent import dependent
from icc.compiler.backends.triton.plan import kernel_of
from icc.compiler.backends.triton.spec import LaunchSpec
from icc.compiler.backends.triton.step_kernel.runs import step_spec
from icc.compiler.backends.triton.step_kernel.schedule import Span, TileStage, schedule
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.program.steps.collective import GatherRows
from icc.compiler.targets import TARGETS
from icc.runtime.format.operands import BufferOperand
from icc.runtime.format.plan import Extent
from snapshot_others import OTHERS
from snapshot_point import LIMITS, MIXED
from snapshot_products import PRODUCTS

FOLDER = Path(__file__).parent / "snapshots"
TRITON = TEMPLATES / "triton"
POINTS = PRODUCTS | OTHERS
SPECS = {name: point.spec() for name, point in POINTS.items()}
_TWO = [POINTS["softmax__2x17"].spec(), POINTS["cumsum__f32"].spec()]
_LINES = frozenset([Span("arena", 0, 64)])
_STAGES = schedule([TileStage("softmax", 1, writes=_LINES), TileStage("cumsum", 1, reads=_LINES)])
_X = BufferOperand("x", "bf16", 96)  # rows are gathered where they lie
_GATHER = GatherRows(kernel="all_gather_rows_0", x=_X, y=_X, n=96, ranks=2, least=4)
[SPECS["collective__own_rows"]] = kernel_of(_GATHER).launches(MIXED, LIMITS, Tuner(TARGETS["h100"]))
SPECS["step__two"] = step_spec(list(enumerate(_TWO)), _STAGES)


def shared_parts() -> dict[str, str]:
    """The templates that others include or take macros from: name -> its text."""
    texts = {file.relative_to(TEMPLATES).as_posix(): file.read_text() for file in TRITON.rglob("*.jinja")}
    included = {name for text in texts.values() for name in re.findall(r'(?:include|from|import) "(.*?)"', text)}
    return {name: texts[name] for name in included}


def snapshot(spec: LaunchSpec) -> str:
    """The launch in one comment, then the source with verbatim parts as their names."""
    args = ", ".join(f"{a.name}{'' if a.aligned else '?'}: {a.type}" for a in spec.args)
    grid = ", ".join(map(extent_text, spec.grid))
    text = spec.source
    for name, part in shared_parts().items():
        if "{{" not in part and "{%" not in part:
            text = text.replace(render(name, None).strip("\n"), f"# {name}")
    return f"# {spec.entry}({args})\n# grid ({grid}), {spec.num_warps} warps, {spec.num_stages} stages\n{text}"


def extent_text(extent: Extent) -> str:
    """Such as `2 * ceil(num_tokens / 16) + 1`."""
    terms = [f"{t.times} * ceil({t.size} / {t.divide})" for t in extent.terms]
    return " + ".join([*terms, *([str(extent.constant)] if extent.constant or not terms else [])])


@pytest.mark.parametrize("name", SPECS)
def test_snapshot(name: str) -> None:
    file, text = FOLDER / f"{name}.py", snapshot(SPECS[name])
    if os.environ.get("ICC_UPDATE_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("name", SPECS)
def test_source_is_python_with_the_entry_and_its_arguments(name: str) -> None:
    spec = SPECS[name]
    functions = {f.name: f for f in ast.parse(spec.source).body if isinstance(f, ast.FunctionDef)}
    assert [a.arg for a in functions[spec.entry].args.args] == [a.name for a in spec.args]


@pytest.mark.parametrize("name", SPECS)
def test_the_kernel_waits_before_it_touches_memory_that_kernels_write(name: str) -> None:
    """Before that it may only ask for weights to come near."""
    spec = dependent(SPECS[name])
    [kernel] = (f for f in ast.parse(spec.source).body if isinstance(f, ast.FunctionDef) and f.name == spec.entry)
    lines = [ast.unparse(line) for line in kernel.body[ast.get_docstring(kernel) is not None :]]
    wait = next(at for at, line in enumerate(lines) if line.endswith("gdc_wait()"))
    before = [line for line in lines[:wait] if not line.startswith("if not INTERPRETED:\n    ask(w_ptr")]
    assert not any("_ptr" in line for line in before) and spec.dependent
    assert spec.source.count("gdc_wait()") == 1


def test_every_template_has_a_snapshot_and_no_snapshot_is_left_over() -> None:
    own = {file.relative_to(TRITON).as_posix() for file in TRITON.rglob("*.jinja")}
    own -= {name.removeprefix("triton/") for name in shared_parts()}
    own = {name for name in own if not name.startswith(("layouts/", "kv/"))}  # macros of others, their check
    assert {name.split("__")[0] for name in SPECS} == {f.removesuffix(".py.jinja").replace("/", "_") for f in own}
    assert {file.stem for file in FOLDER.iterdir()} == set(SPECS)
