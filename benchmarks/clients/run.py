"""Clients that people use, unmodified, against the scripted server, each in an environment of its own.

python benchmarks/clients/run.py [NAME,NAME]        writes benchmarks/results/clients.md

Environments are made in build/clients with `uv` where it is installed, or else with venv and pip. Open Responses'
compliance suite is run too if $OPENRESPONSES is a checkout of it in which `npm install` was run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "clients.md"
CLIENTS = {
    "langchain": ["langchain-openai", "langchain-anthropic"],
    "llamaindex": ["llama-index-core", "llama-index-llms-openai-like"],
    "litellm": ["litellm", "mcp"],
    "instructor": ["instructor", "anthropic"],
    "pydantic_ai": ["pydantic-ai-slim[openai,anthropic]"],
    "lm_eval": ["lm_eval[api]"],
}


def environment(name: str) -> Path:
    """The Python of a client's environment, which is made if it is not there."""
    folder = Path(os.environ.get("CLIENT_ENVIRONMENTS", ROOT / "build" / "clients")) / name
    python = folder / "bin" / "python"
    if not python.exists():
        if uv := shutil.which("uv"):
            subprocess.run([uv, "venv", "-q", "--python", sys.executable, folder], check=True)
            install = [uv, "pip", "install", "-q", "--python", python]
        else:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            install = [python, "-m", "pip", "install", "-q"]
        subprocess.run([*install, *CLIENTS[name]], check=True)
    return python


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
    python = environment(name)
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
    """What Open Responses' own suite says of the server."""
    command = [checkout / "node_modules" / ".bin" / "tsx", "bin/compliance-test.ts", "--json"]
    command += ["-u", f"{url}/v1", "-k", "none", "-m", "scripted"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    results = json.loads(done.stdout)["results"]
    return {r["id"]: "ok" if r["status"] == "passed" else (r["errors"] or ["failed"])[0][:120] for r in results}


def main(arguments: list[str]) -> int:
    names = arguments[0].split(",") if arguments else list(CLIENTS)
    rows: list[tuple[str, str, str]] = []
    with server() as url:
        for name in names:
            client, found = run(name, url)
            rows += [(client, feature, result) for feature, result in found.items()]
        if checkout := os.environ.get("OPENRESPONSES"):
            rows += [("Open Responses' suite", *item) for item in compliance(Path(checkout), url).items()]
    table = ["| client | feature | result |", "|---|---|---|"]
    table += [f"| {client} | {feature} | {result.replace('|', '/')} |" for client, feature, result in rows]
    text = "\n".join(table)
    print(text)
    if not arguments:
        head = "# Clients\n\nUnmodified, a scripted model behind the real server: `python benchmarks/clients/run.py`."
        RESULTS.write_text(f"{head}\n\n{text}\n")
    return int(any(result != "ok" for client, _, result in rows if not client.startswith("Open")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
