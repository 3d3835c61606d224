"""icc's server beside llama.cpp's and OpenVINO's continuous batching, in interleaved rounds of `icc bench serve`.

    python benchmarks/serve/bench.py --engine build/serve/llama-1b.engine --gguf build/serve/1b.gguf \
        --llama-server PATH --openvino build/cpu/1b-openvino --tokenizer build/serve/llama-1b/tokenizer.json \
        --peers build/peers --out benchmarks/results/serve.json

llama-server is built from the sources that llama-cpp-python's source package carries (`cmake -DGGML_NATIVE=ON`).

All servers run all the time; only one at a time gets requests. A ratio is the median of the ratios within the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
PORTS = {"icc": 8101, "llama.cpp": 8102, "openvino": 8103}


def commands(a: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each server, with equal threads and batch sizes, and KV capacity for every sequence."""
    length, threads, slots = a.prompt_tokens + a.output_tokens + 64, str(a.threads), str(a.concurrency)
    return {
        "icc": [str(Path(sys.executable).with_name("icc")), "serve", str(a.engine), "--threads", threads],
        "llama.cpp": [
            str(a.llama_server), "-m", str(a.gguf), "-t", threads, "-tb", threads, "-np", slots,
            "-c", str(a.concurrency * length), "-b", "512", "-ub", "512", "-fa", "on", "--no-webui", "--cache-ram", "0",
        ],
        "openvino": [
            str(a.peers / "bin/python"), str(HERE / "openvino_server.py"), str(a.openvino), str(a.tokenizer),
            "--threads", threads, "--slots", slots,
        ],
    }  # fmt: skip


def wait_until_up(port: int, process: subprocess.Popen, seconds: float = 120.0) -> None:
    """Wait until the server lists its models; SystemExit if it ends or takes over `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"the server on port {port} does not come up")


def measure(port: int, a: argparse.Namespace, seed: int) -> dict:
    """Put one load on one server; its report by `icc bench serve`."""
    command = [str(Path(sys.executable).with_name("icc")), "bench", "serve", "--url", f"http://127.0.0.1:{port}"]
    command += ["--concurrency", str(a.concurrency), "--requests", str(a.requests), "--seed", str(seed), "--json"]
    command += ["--prompt-tokens", str(a.prompt_tokens), "--output-tokens", str(a.output_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"icc bench serve: {done.stderr.strip()}")
    return json.loads(done.stdout)["loads"][0]


def table(results: dict[str, list[dict]]) -> str:
    """Medians over the rounds as Markdown."""
    rates = {name: [level["output_tokens_per_s"] for level in levels] for name, levels in results.items()}
    lines = ["| server | tokens/s out | icc's ratio (range) | TTFT p50 | between tokens p50 |", "|---" * 5 + "|"]
    for name, levels in results.items():
        ratios = [ours / theirs for ours, theirs in zip(rates["icc"], rates[name], strict=True)]
        ttft, gap = (statistics.median(level[key]["p50"] for level in levels) for key in ("ttft_ms", "inter_token_ms"))
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        lines.append(f"| {name} | {statistics.median(rates[name]):.1f} | {ratio} | {ttft / 1e3:.1f} s | {gap:.0f} ms |")
    return "\n".join(lines)


def main() -> None:
    """Start the servers, measure, stop them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("engine", "gguf", "llama-server", "openvino", "tokenizer", "peers"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    for name, default in (("concurrency", 16), ("requests", 32), ("prompt-tokens", 256), ("output-tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    a = parser.parse_args()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    servers: dict[str, subprocess.Popen] = {}
    results: dict[str, list[dict]] = {name: [] for name in PORTS}
    try:
        for name, command in commands(a).items():
            servers[name] = subprocess.Popen([*command, "--port", str(PORTS[name])], **quiet)
            wait_until_up(PORTS[name], servers[name])
        for number in range(a.rounds):
            for name, port in PORTS.items():
                results[name].append(measure(port, a, number))
                print(f"round {number}, {name}: {results[name][-1]}", flush=True)
    finally:
        for server in servers.values():
            server.terminate()
    print(table(results))
    if a.out:
        a.out.write_text(json.dumps(results, indent=1) + "\n")
        a.out.with_suffix(".md").write_text(table(results) + "\n")


if __name__ == "__main__":
    main()
