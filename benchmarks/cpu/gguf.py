"""icc beside llama.cpp on the same GGUF files: decode at batch 1 and 8, and prefill, in interleaved rounds.

    python benchmarks/cpu/gguf.py build/peers/bin/python FILE.gguf=ENGINE ... [--threads 2] [--clock wall] [--rounds 3]

ENGINE is what `icc compile FILE.gguf` made. A ratio is the median over the rounds of the ratios within one round, of
tokens per second (icc over llama.cpp); its range is beside it. On a machine that others use, `--threads 1 --clock cpu`
counts each process's own CPU seconds, in which waiting for a core has no part; what others take of the memory's
bandwidth has.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from bench import Worker

BATCH = 8


def rows(prefill: int, steps: int) -> list[dict[str, Any]]:
    """What is measured."""
    return [
        {"name": "decode b1", "what": "decode", "batch": 1, "context": 16, "steps": steps},
        {"name": f"decode b{BATCH}", "what": "decode", "batch": BATCH, "context": 16, "steps": max(steps // 2, 2)},
        {"name": f"prefill {prefill}", "what": "prefill", "batch": 1, "context": prefill, "steps": 1},
    ]


def compare(python: str, pairs: list[str], threads: int, rounds: int, wanted: list[dict[str, Any]]) -> list[str]:
    """Lines of the table."""
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
            if not found:
                lines.append(f"| {Path(file).name} | {row['name']} | cannot | | |")
                continue
            ratios = [a / b for a, b in found]
            own, other = (statistics.median(values) for values in zip(*found, strict=True))
            text = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            lines.append(f"| {Path(file).name} | {row['name']} | {own:.1f} | {other:.1f} | {text} |")
            print(lines[-1], flush=True)
        ours.close()
        peer.close()
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="of the environment that has llama-cpp-python")
    parser.add_argument("pairs", nargs="+", metavar="FILE=ENGINE")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill", type=int, default=512, help="tokens (512)")
    parser.add_argument("--steps", type=int, default=32, help="of decode at batch 1 (32)")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    a = parser.parse_args()
    os.environ["BENCH_CLOCK"] = a.clock
    print("| file | row | icc tok/s | llama.cpp tok/s | ratio (range) |\n|---|---|---|---|---|", flush=True)
    compare(a.python, a.pairs, a.threads, a.rounds, [row for row in rows(a.prefill, a.steps) if a.only in row["name"]])


if __name__ == "__main__":
    main()
