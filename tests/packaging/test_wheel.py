"""The contents of the wheel, and the commands that run with only the base package installed."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Iterable
from importlib.metadata import Distribution
from pathlib import Path

import icc
import pytest

from .conftest import requirements, run

PROMPT = "def fib(n):"
RUN = ("-p", PROMPT, "--max-tokens", "12", "--temperature", "0", "--json")
RUNTIME_NEEDS = ("numpy", "tokenizers", "msgspec")
COMPILE_SIDE = ("torch", "transformers", "triton", "safetensors", "jinja2")


@pytest.fixture(scope="session")
def expected(engine: Path) -> list[int]:
    """The token ids of the greedy completion, computed in this process."""
    with icc.load(engine) as llm:
        [completion] = llm.generate([PROMPT], icc.SamplingParams(max_tokens=12, temperature=0.0))
    return list(completion.token_ids)


def test_the_wheel_holds_the_package_and_nothing_else(source: Path, wheel: Path) -> None:
    files = [source / name for name in ("__init__.py", "__main__.py", "py.typed")]
    for part in ("compiler", "passes", "runtime"):
        files += (source / part).rglob("*.py")
    files += (file for file in (source / "codegen_templates").rglob("*") if file.is_file())
    files += (source / "compiler" / "data").iterdir()
    files += (source / "compiler" / "backends" / "triton" / "tiling" / "tuned").glob("*.json")
    files += (source / "runtime" / "server" / "http" / "page").iterdir()
    files += (file for file in (source / "runtime" / "report").iterdir() if file.suffix in (".css", ".js"))
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == {f"icc/{file.relative_to(source).as_posix()}" for file in files}


def test_the_base_package_asks_for_no_compile_side(wheel: Path) -> None:
    base = requirements(wheel)
    assert {*RUNTIME_NEEDS, "minijinja", "click", "rich"} <= set(base)
    assert not set(base) & set(COMPILE_SIDE)
    assert {"torch", "transformers"} <= set(requirements(wheel, "compile"))


def test_icc_runs_an_engine_where_only_the_base_package_is(
    base_install: Path, engine: Path, expected: list[int], tmp_path: Path
) -> None:
    for name in COMPILE_SIDE:
        done = run(base_install / "python", "-c", f"import {name}", cwd=tmp_path, check=False)
        assert "ModuleNotFoundError" in done.stderr
    assert json.loads(run(base_install / "icc", "run", engine, *RUN, cwd=tmp_path).stdout)["token_ids"] == expected
    assert "tok/s" in run(base_install / "icc", "run", engine, "-p", PROMPT, cwd=tmp_path).stderr
    (tmp_path / "plain.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    answer = run(base_install / "icc", "run", engine, *RUN, "--chat-template", "plain.jinja", "--chat", cwd=tmp_path)
    assert json.loads(answer.stdout)["token_ids"]
    assert "llama" in run(base_install / "icc", "inspect", engine, cwd=tmp_path).stdout.lower()
    lengths = ("--prompt-tokens", "8", "--output-tokens", "4")
    assert "decode tok/s" in run(base_install / "icc", "bench", engine, *lengths, cwd=tmp_path).stdout


def test_icc_can_be_imported_and_loads_an_engine_where_only_the_base_package_is(
    base_install: Path, engine: Path, expected: list[int], tmp_path: Path
) -> None:
    code = (
        "import icc, sys\n"
        "with icc.load(sys.argv[1]) as llm:\n"
        f"    [done] = llm.generate([{PROMPT!r}], icc.SamplingParams(max_tokens=12, temperature=0.0))\n"
        "print(icc.__file__, list(done.token_ids), sep='\\n')"
    )
    where, ids = run(base_install / "python", "-c", code, engine, cwd=tmp_path).stdout.splitlines()
    assert Path(where).is_relative_to(base_install.parent)
    assert json.loads(ids) == expected


def test_icc_compile_says_what_is_missing(base_install: Path, source: Path, tmp_path: Path) -> None:
    model = source / "samples" / "pystd"
    done = run(base_install / "icc", "compile", model, "-o", tmp_path / "x.engine", cwd=tmp_path, check=False)
    assert done.returncode not in (0, 1) and "Traceback" not in done.stderr
    assert "icc-llm[compile]" in done.stderr


def test_icc_serve_says_what_is_missing(base_install: Path, engine: Path, tmp_path: Path) -> None:
    done = run(base_install / "icc", "serve", engine, cwd=tmp_path, check=False)
    assert done.returncode == 3 and "Traceback" not in done.stderr and "icc-llm[serve]" in done.stderr
    done = run(
        base_install / "icc", "bench", "serve", "--url", "http://127.0.0.1:9", "--rate", "1", cwd=tmp_path, check=False
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr  # the load tool needs no extra


def test_icc_batch_needs_no_extra(base_install: Path, engine: Path, expected: list[int], tmp_path: Path) -> None:
    body = {"model": "pystd", "prompt": PROMPT, "max_tokens": len(expected), "temperature": 0}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(request) + "\n")
    run(base_install / "icc", "batch", engine, "in.jsonl", "out.jsonl", cwd=tmp_path)
    [answer] = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert answer["response"]["status_code"] == 200
    assert answer["response"]["body"]["usage"]["completion_tokens"] == len(expected)


def test_the_extra_serve_asks_for_no_compile_side(wheel: Path) -> None:
    found = set(requirements(wheel, "serve"))
    assert {"fastapi", "uvicorn", "llguidance", "prometheus-client"} <= found
    assert not found & {*COMPILE_SIDE, "openai", "schemathesis"}


def test_an_engine_runs_itself_with_three_libraries(
    wheel: Path,
    make_environment: Callable[[Iterable[Distribution]], Path],
    engine: Path,
    expected: list[int],
    tmp_path: Path,
) -> None:
    base = requirements(wheel)
    bin_dir = make_environment(base[name] for name in RUNTIME_NEEDS)
    moved = shutil.copytree(engine, tmp_path / "elsewhere.engine")
    done = run(bin_dir / "python", moved, "run", *RUN, cwd=tmp_path)
    assert json.loads(done.stdout)["token_ids"] == expected
    refused = run(bin_dir / "python", moved, "serve", cwd=tmp_path, check=False)
    assert (
        refused.returncode == 3 and "icc-llm[serve]" in refused.stderr and not (moved / "runtime" / "server").exists()
    )
