"""icc beside the CPU engines that users may choose instead, and beside the machine's limits, in interleaved rounds.

    python benchmarks/cpu/bench.py CONFIG.json [--rounds 5] [--out benchmarks/results/cpu]

CONFIG names the engines and the rows; `make bench-cpu` writes one (prepare.py). Each engine runs in its own process
and waits on its standard input while the others are measured. A round measures every row on every engine, and the
read bandwidth before and after each; a ratio is the median over the rounds of the ratios within one round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
from icc.compiler.backends.cpu.kernels.linear import SCREENED_ROWS
from icc.runtime.format.kv import KVLayout
from limits import limits, read_bandwidth

HERE = Path(__file__).parent
ENOUGH = 1.5  # seconds of prefill that are measured for one cell of the table


class Worker:
    """One engine's process."""

    def __init__(self, name: str, spec: dict[str, Any], threads: int) -> None:
        self.name = name
        command = [spec["python"], str(HERE / "workers.py"), spec["kind"], spec["model"], str(threads),
                   str(spec.get("batch", 16)), str(spec.get("length", 2200))]  # fmt: skip
        environment = {**os.environ, **spec.get("env", {}), "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._ask(None)

    def _ask(self, request: dict[str, Any] | None) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        if request is not None:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended")
        return json.loads(line)

    def measure(self, row: dict[str, Any], seed: str) -> float | None:
        """Tokens per second of one row; None if the engine cannot run it. A short prefill is run several times."""
        prefills: list[float] = []
        while not prefills or (row["what"] == "prefill" and sum(prefills) < ENOUGH):
            request = {"batch": row["batch"], "context": row["context"], "steps": row["steps"]}
            answer = self._ask(request | {"seed": f"{seed} {len(prefills)}"})
            if "error" in answer:
                print(f"{self.name}, {row['name']}: {answer['error']}", file=sys.stderr, flush=True)
                return None
            prefills.append(answer["prefill"])
        if row["what"] == "prefill":
            return row["batch"] * row["context"] / statistics.median(prefills)
        return row["batch"] / statistics.median(answer["steps"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)


def measure(config: dict[str, Any], rounds: int, threads: int) -> dict[str, Any]:
    """Every row, engine and round."""
    workers = {name: Worker(name, spec, threads) for name, spec in config["engines"].items()}
    found: dict[str, dict[str, list[float | None]]] = {row["name"]: {} for row in config["rows"]}
    bandwidth: dict[str, list[float]] = {row["name"]: [] for row in config["rows"]}
    for number in range(rounds + 1):  # the first round warms up
        for row in config["rows"]:
            for name in row["engines"]:
                before = read_bandwidth(threads)
                rate = workers[name].measure(row, f"{number} {row['name']}")  # prompts that are in no prefix cache
                if number:
                    found[row["name"]].setdefault(name, []).append(rate)
                    if name == row["engines"][0]:
                        bandwidth[row["name"]].append(max(before, read_bandwidth(threads)))
            print(f"round {number}: {row['name']}", flush=True)
    for worker in workers.values():
        worker.close()
    peaks = limits(threads)
    return {"rates": found, "bandwidth": bandwidth, "limits": asdict(peaks)}


def work(spec: dict[str, Any], row: dict[str, Any]) -> tuple[float, float]:
    """(bytes that a decode step must read, operations per token of the products), from an engine's program.

    If the batch is small enough for a screened head, only the high nibbles of the head must be read.
    """
    program = json.loads((Path(spec["model"]) / "program.json").read_text())
    screens = spec["kind"] == "icc" and row["batch"] <= SCREENED_ROWS
    read: dict[str, int] = {}
    operations = 0
    for step in program["steps"]:
        if step["op"] in ("linear", "linear_q") and (row["what"] == "decode" or "rows" not in step):  # of tokens
            operations += 2 * step["k"] * step["n"]
        low = step["k"] * step["n"] // 2 if screens and step.get("screened") else 0
        if step["op"] != "embedding":
            read |= {
                o["name"]: program["weights"][o["name"]]["nbytes"] - low
                for o in step.values()
                if isinstance(o, dict) and o.get("space") == "weight"
            }
    kv = msgspec.json.decode(json.dumps(program["kv"]), type=KVLayout)
    cached = sum(group.bytes_read(round(row["context"] + row["steps"] / 2)) for group in kv.groups)
    return sum(read.values()) + row["batch"] * cached, operations


def summary(
    row: dict[str, Any],
    spec: dict[str, Any],
    rates: dict[str, list[float | None]],
    bandwidth: list[float],
    limit: dict[str, float],
) -> dict[str, Any]:
    """Medians, the best peer, the ratio to it, and the shares of the limits."""
    medians = {name: statistics.median(r) for name, found in rates.items() if (r := [x for x in found if x])}
    ours, *peers = [name for name in row["engines"] if name in medians]
    best = max(peers, key=lambda name: medians[name], default=None)
    result: dict[str, Any] = {
        "name": row["name"],
        "medians": medians,
        "ours": ours,
        "best": best,
        "goal": row.get("goal"),
    }
    if best:
        ratios = [a / b for a, b in zip(rates[ours], rates[best], strict=True) if a and b]
        result |= {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
    own = [x for x in rates[ours] if x]
    needed, operations = work(spec, row)
    if row["what"] == "decode":
        shares = [rate / row["batch"] * needed / read for rate, read in zip(own, bandwidth, strict=True)]
        result |= {"bytes": needed, "of_bandwidth": statistics.median(shares), "read": statistics.median(bandwidth)}
    result["of_peak"] = medians[ours] * operations / limit[row["peak"]]
    return result


def table(results: list[dict[str, Any]]) -> str:
    """The summary as Markdown."""
    head = ("row", "icc tok/s", "best peer", "its tok/s", "ratio (range)", "goal", "of read bandwidth", "of peak")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for r in results:
        ratio = f"{r['ratio']:.2f} ({r['ratio_min']:.2f}-{r['ratio_max']:.2f})" if r.get("best") else ""
        share = f"{100 * r['of_bandwidth']:.0f} %" if "of_bandwidth" in r else ""
        peer, rate = (r["best"], f"{r['medians'][r['best']]:.1f}") if r.get("best") else ("", "")
        own, peak = f"{r['medians'][r['ours']]:.1f}", f"{100 * r['of_peak']:.0f} %"
        lines.append(f"| {' | '.join((r['name'], own, peer, rate, ratio, r['goal'] or '', share, peak))} |")
    return "\n".join(lines)


def chart(results: list[dict[str, Any]], out: Path) -> None:
    """Bars of every engine per row, relative to the best peer."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = [r for r in results if r.get("best")]
    names = list(dict.fromkeys(name for r in rows for name in r["medians"]))
    figure, axes = pyplot.subplots(figsize=(10, 4))
    for i, name in enumerate(names):
        heights = [r["medians"].get(name, 0.0) / r["medians"][r["best"]] for r in rows]
        axes.bar([x + i * 0.8 / len(names) for x in range(len(rows))], heights, 0.8 / len(names), label=name)
    axes.set_xticks([x + 0.4 for x in range(len(rows))], [r["name"] for r in rows], rotation=20, ha="right")
    axes.set_ylabel("tokens/s over the best peer's")
    axes.axhline(1.0, color="grey", linewidth=0.5)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    """Measure, write JSON, table and chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="rows whose name contains one of these (comma-separated)")
    parser.add_argument("--without", default="", help="leave out rows and engines whose name contains one of these")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    config = json.loads(a.config.read_text())
    config["rows"] = [row for row in config["rows"] if any(part in row["name"] for part in a.only.split(","))]
    for part in filter(None, a.without.split(",")):
        config["rows"] = [row for row in config["rows"] if part not in row["name"]]
        for row in config["rows"]:
            row["engines"] = [name for name in row["engines"] if part not in name]
    used = {name for row in config["rows"] for name in row["engines"]}
    config["engines"] = {name: spec for name, spec in config["engines"].items() if name in used}
    raw = measure(config, a.rounds, a.threads)
    results = [
        summary(
            row, config["engines"][row["engines"][0]], raw["rates"][row["name"]], raw["bandwidth"][row["name"]],
            raw["limits"],
        )
        for row in config["rows"]
    ]  # fmt: skip
    print(table(results))
    if a.out:
        facts = {
            "date": date.today().isoformat(),
            "cpu": platform.processor(),
            "threads": a.threads,
            **config.get("facts", {}),
        }
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.with_suffix(".json").write_text(json.dumps({**facts, "results": results, **raw}, indent=1) + "\n")
        a.out.with_suffix(".md").write_text(table(results) + "\n")
        chart(results, a.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
