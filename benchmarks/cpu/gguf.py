"""icc beside llama.cpp on the same GGUF files: decode at batch 1 and 8, prefill, and the start of a process, in
interleaved rounds; each ratio is shown beside its goal.

    python benchmarks/cpu/gguf.py build/peers/bin/python FILE.gguf=ENGINE ... [--threads 2] [--clock wall] [--rounds 3]

ENGINE is what `icc compile FILE.gguf` made. A ratio is the median over the rounds of the ratios within one round, of
tokens per second (icc over llama.cpp); its range is beside it. On a shared machine, `--threads 1 --clock cpu` counts
each process's own CPU seconds, which exclude waiting for a core but include the effect of others' memory traffic.

The row "start": seconds from the start of a process to the first byte of its answer to a short prompt: `python ENGINE
run`, with all files verified, and llama-cpp-python with the same file and context. Both files are in the page cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import Worker

BATCH = 8
GOALS = {"decode b1": ">= 1.0", "decode b8": ">= 1.8", "prefill": ">= 1.8", "start": "<= 0.5"}
PROMPT, IDS = "The capital of France is", "5,6,7,8,9"
LLAMA = """
import sys
import llama_cpp
file, threads, prompt = sys.argv[1], int(sys.argv[2]), sys.argv[3]
llm = llama_cpp.Llama(file, n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)
if prompt[0].isdigit():  # a file without tokens
    print(next(llm.generate([int(token) for token in prompt.split(",")], temp=0)), flush=True)
else:
    for piece in llm(prompt, max_tokens=1, temperature=0, stream=True):
        print(piece["choices"][0]["text"], end="", flush=True)
"""


def line(file: str, row: str, found: list[tuple[float, float]], unit: str) -> str:
    """One line of the table: medians of both, and of the ratios within rounds."""
    goal = next((goal for name, goal in GOALS.items() if row.startswith(name)), "")
    if not found:
        return f"| {Path(file).name} | {row} | cannot | | | {goal} |"
    ratios = [own / other for own, other in found]
    own, other = (statistics.median(values) for values in zip(*found, strict=True))
    text = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    return f"| {Path(file).name} | {row} | {own:{unit}} | {other:{unit}} | {text} | {goal} |"


def first_byte(command: list[str]) -> float:
    """Seconds from starting a process to the first byte that it prints."""
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit(f"{' '.join(command)} printed nothing")
        found = time.perf_counter() - begin
        process.stdout.read()
    return found


def start(own: str, python: str, file: str, engine: str, threads: int, rounds: int) -> list[tuple[float, float]]:
    """Seconds to the first byte of icc and llama.cpp, interleaved, each by its Python; the first round warms up."""
    texts = (Path(engine) / "tokenizer").is_dir()
    prompt = ["-p", PROMPT, "--raw"] if texts else ["--ids", IDS]
    ours = [own, engine, "run", *prompt, "--max-tokens", "1", "--threads", str(threads)]
    peer = [python, "-c", LLAMA, file, str(threads), PROMPT if texts else IDS]
    return [(first_byte(ours), first_byte(peer)) for _ in range(rounds + 1)][1:]


def rows(prefill: int, steps: int) -> list[dict[str, Any]]:
    """The rows to measure, as requests to workers.py."""
    return [
        {"name": "decode b1", "what": "decode", "batch": 1, "context": 16, "steps": steps},
        {"name": f"decode b{BATCH}", "what": "decode", "batch": BATCH, "context": 16, "steps": max(steps // 2, 2)},
        {"name": f"prefill {prefill}", "what": "prefill", "batch": 1, "context": prefill, "steps": 1},
    ]


def compare(python: str, pairs: list[str], threads: int, rounds: int, wanted: list[dict[str, Any]]) -> list[str]:
    """Measure all rows on all files; the lines of the table."""
    lines: list[str] = []
    length = max(row["context"] for row in wanted) + 200
    for pair in pairs:
        file, _, engine = pair.partition("=")
        spec = {"batch": BATCH, "length": length}
        ours = Worker("icc", spec | {"kind": "icc", "python": sys.executable, "model": engine}, threads)
        peer = Worker("llama.cpp", spec | {"kind": "llama", "python": python, "model": file}, threads)
        for row in wanted:
            found: list[tuple[float, float]] = []
            for number in range(rounds + 1):  # the first round warms up
                both = [worker.measure(row, f"{number} {row['name']}") for worker in (ours, peer)]
                if number and both[0] and both[1]:
                    found.append((both[0], both[1]))
            lines.append(line(file, row["name"], found, ".1f"))
            print(lines[-1], flush=True)
        ours.close()
        peer.close()
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="the Python of the environment that has llama-cpp-python")
    parser.add_argument("pairs", nargs="+", metavar="FILE=ENGINE")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--starts", type=int, default=7, help="rounds of the row start (7)")
    parser.add_argument(
        "--own", default=sys.executable, metavar="PYTHON", help="the Python of ENGINE in the row start (this one)"
    )
    parser.add_argument("--prefill", type=int, default=512, help="tokens of a prefill (512)")
    parser.add_argument("--steps", type=int, default=32, help="decode steps at batch 1 (32)")
    parser.add_argument("--only", default="", help="measure only rows whose name contains this")
    a = parser.parse_args()
    os.environ["BENCH_CLOCK"] = a.clock
    print("| file | row | icc | llama.cpp | icc / llama.cpp (range) | goal |\n|---|---|---|---|---|---|", flush=True)
    if wanted := [row for row in rows(a.prefill, a.steps) if a.only in row["name"]]:
        compare(a.python, a.pairs, a.threads, a.rounds, wanted)
    for file, _, engine in (pair.partition("=") for pair in a.pairs if a.only in "start"):
        print(line(file, "start, s", start(a.own, a.python, file, engine, a.threads, a.starts), ".2f"), flush=True)


if __name__ == "__main__":
    main()
