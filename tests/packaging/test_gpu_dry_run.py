"""The parts of `make gpu-visit` that open and run engines, over a driver without a GPU: mistakes that would end a part
at once, such as a wrong argument or name, show here.

Scripts run in this process with the arguments of their parts. Checkpoints of the same names are tiny; objects are not
compiled and hold only their names, kernels do nothing, and memory is zeros. Times and answers mean nothing.
"""

from __future__ import annotations

import importlib
import io
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from sizes import soak

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FOLDERS = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "triton")]
TINY = (128, 1, 2, 1, 256, 1024, False)  # hidden, layers, heads, KV heads, inner, vocabulary, tied
VERDICTS = {"idle": "MISSED: idle "}  # last lines of parts that ran with bad times
LEAST = {"--rounds": "1", "--adapters": "2", "--seconds": "0.2"}  # replaces the part's own value


@pytest.fixture(scope="module")
def visit() -> Iterator[Any]:
    """The module gpu_visit.py; its folders are on the path until the end of the tests."""
    sys.path[:0] = FOLDERS
    before = set(sys.modules)
    try:
        yield importlib.import_module("gpu_visit")
    finally:
        del sys.path[: len(FOLDERS)]
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(FOLDERS[0]):
                del sys.modules[name]


@pytest.fixture(scope="module")
def dry(visit: Any) -> Iterator[None]:
    """No GPU, no compiler, and checkpoints of a few thousand parameters."""
    import icc
    import make_model
    from fake_cuda import FakeDriver
    from icc.compiler.backends.triton import fallback
    from icc.compiler.backends.triton.objects import compile as objects
    from icc.compiler.measure import gpu_tune
    from icc.runtime.executor.cuda import driver

    table: dict[bytes, Any] = {}

    def compile_specs(specs: Any, *_: Any, refused: Any = None, **__: Any) -> dict[str, Any]:
        found = {objects.spec_key(spec): spec for spec in specs}
        table.update({key.encode(): spec for key, spec in found.items()})
        return {key: objects.Compiled(s.entry, key.encode(), 1024, 32, 0, 12000) for key, s in found.items()}

    load, write = icc.load, make_model.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "load_bindings", lambda: FakeDriver(table, free=256 << 20, dry=True, fill=0))
        for module in (fallback, objects, gpu_tune):
            patch.setattr(module, "compile_specs", compile_specs)
        patch.setattr(fallback, "check_launch", lambda *_: None)
        patch.setattr(fallback, "plan_faults", lambda *_: {})
        for name in ("llama-8b", "llama-8b-quarter", "llama-1b"):
            patch.setitem(make_model.SHAPES, name, TINY)
        patch.setattr(make_model, "write", lambda shape, out, **_: write(shape, out))
        patch.setattr(icc, "load", lambda *a, **given: load(*a, **given | {"kv_bytes": 32 << 20}))
        gpu = importlib.import_module("gpu")
        patch.setattr(gpu, "device_limits", lambda: {"name": "none", "copy_gb_s": 1.0, "matmul_tflop_s": 1.0})
        patch.setattr(gpu, "write", make_model.write)
        few = {"BATCHES": (1, 3), "OUTPUT": 3, "PREFILL": 24, "DECODE_CONTEXT": 8}
        few["ENGINE_LIMITS"] = {"max_seq_len": 512, "max_batch_size": 4, "max_step_tokens": 32}  # type: ignore[assignment]
        for name, value in few.items():
            patch.setattr(gpu, name, value)
        yield


def run_part(visit: Any, name: str, work: Path, keep: Callable[[str], str] = str) -> str:
    """Run the commands of a part with the fewest rounds; returns their output. keep: changes an argument."""
    [part] = [part for part in visit.PARTS if part.name == name]
    shown = io.StringIO()
    for command in part.commands:
        python, *words = [
            keep(word.format(python="python", target="h200", work=work, here=visit.HERE))
            for word in shlex.split(command)
        ]
        assert python == "python"
        for option, least in LEAST.items():
            if option in words and words[at := words.index(option) + 1].isdigit():
                words[at] = least
        with redirect_stdout(shown):
            status = _run(words, work)
        assert not status or VERDICTS.get(name, "?") in shown.getvalue(), shown.getvalue()
    return shown.getvalue()


def _run(words: list[str], folder: Path) -> int:
    """Run a script of benchmarks/, or icc, in a folder; returns its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        patch.chdir(folder)
        try:
            if words[:2] == ["-m", "icc"]:
                from icc.compiler.cli import main

                return int(main(args=words[2:], prog_name="icc") or 0)
            return int(importlib.import_module(Path(words[0]).stem).main() or 0)
        except SystemExit as ended:
            return int(ended.code or 0)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("visit")


@pytest.fixture(scope="module")
def timed(visit: Any, dry: None, work: Path) -> str:
    """The output of the part that measures speeds, for the 4-bit engine alone; other parts use its files."""
    return run_part(visit, "speed-8b", work, lambda word: word.replace("rtn4,none,fp8", "rtn4"))


def test_speeds_are_rows(timed: str, work: Path) -> None:
    assert '"decode_tok_s"' in timed and '"failed"' not in timed and (work / "gpu-8b.json").is_file()
    assert (work / "speed" / "llama-8b-quarter-rtn4.engine" / "engine.json").is_file()


OPENING = ["products", *soak("step", "speculation", "idle", "tune", "speed-1b")]


@pytest.mark.parametrize("part", OPENING)
def test_a_part_runs_to_its_end(part: str, visit: Any, timed: str, work: Path) -> None:
    assert run_part(visit, part, work).strip()


@pytest.mark.soak
def test_objects_of_steps_travel_along(visit: Any, dry: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The objects that --prepare compiles for the part "step" are all that it needs, including step kernels."""
    from icc.compiler.backends.triton import fallback
    from icc.compiler.backends.triton.objects import compile as objects

    asked: dict[str, Any] = {}
    plain = objects.compile_specs

    def noted(specs: Any, *args: Any, **named: Any) -> Any:
        specs = list(specs)
        asked.update({objects.spec_key(spec): spec for spec in specs})
        return plain(specs, *args, **named)

    gpu_step = importlib.import_module("gpu_step")
    for module in (fallback, objects, gpu_step):
        monkeypatch.setattr(module, "compile_specs", noted)
    visit.prepare_steps("h200")
    prepared = set(asked)
    assert len({key for key in prepared if key.startswith("step_")}) >= 2 * len(gpu_step.STEPS_AS_ONE)
    asked.clear()
    assert run_part(visit, "step", tmp_path).strip()
    assert asked and set(asked) <= prepared


@pytest.mark.soak
def test_adapters_run_to_their_end(visit: Any, timed: str, work: Path) -> None:
    run_part(visit, "speed-1b", work, lambda word: word.replace("none,rtn4,fp8", "rtn4"))
    assert "ms" in run_part(visit, "adapters", work)


def test_an_argument_that_is_none_ends_a_part(visit: Any, timed: str, work: Path) -> None:
    """Planted mistakes: an unknown kind of step, and a missing engine."""
    with pytest.raises(AssertionError):
        run_part(visit, "products", work, lambda word: word.replace("--phases", "--kinds"))
    with pytest.raises(Exception, match="other"):
        run_part(visit, "products", work, lambda word: word.replace("llama-8b-quarter", "other"))
