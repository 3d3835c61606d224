"""RELIABILITY R13 and R14 in figures: a server under more load than its capacity, and under malicious clients.

    python benchmarks/serve/limits.py ENGINE [--seconds 20] [--turns 1] [--loads 1,2,3,10] [--attacks 300]
        [--max-wait 0.025] [--check]

Starts `icc serve` itself. Prints one JSON value: goodput, the time of refusals and of first tokens at some multiples
of the capacity (requests per second that meet the SLO, closed loop), and the growth of the processes' memory. With
--check the exit code is 1 if a goal of RELIABILITY is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
from icc.runtime.loadtest.endpoint import Endpoint, Trace
from icc.runtime.loadtest.load import Level, Mix, PromptMaker, run_level, tokens_per_word

SLO_S = 2.0  # seconds to the first token
MIX = Mix((64, 64), (32, 32))


def resident(server: psutil.Process) -> float:
    """Resident memory in MiB of the server and its children."""
    return sum(process.memory_info().rss for process in [server, *server.children(recursive=True)]) / 2**20


def good(traces: list[Trace]) -> list[Trace]:
    return [trace for trace in traces if trace.ok and trace.pieces[0] - trace.due <= SLO_S]


def rate(traces: list[Trace]) -> float:
    """Requests per second that met the SLO."""
    return len(good(traces)) / (max(trace.end for trace in traces) - min(trace.due for trace in traces))


def percentile_ms(seconds: list[float], share: float) -> float | None:
    return round(1e3 * float(np.percentile(seconds, share)), 1) if seconds else None


@dataclass
class Load:
    """The results of one multiple of the capacity, over all turns. shares: goodputs over the turn's capacity."""

    traces: list[Trace] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    growth_mib: float = 0.0

    def row(self, times: float) -> dict[str, Any]:
        refused = [trace for trace in self.traces if trace.status == 429]
        return {
            "load": f"{times:g}x",
            "requests": len(self.traces),
            "refused": len(refused),
            "failed": sum(not trace.ok for trace in self.traces) - len(refused),
            "goodput_share_of_capacity": round(float(np.mean(self.shares)), 3),
            "refusal_p50_ms": percentile_ms([trace.end - trace.due for trace in refused], 50),
            "refusal_p99_ms": percentile_ms([trace.end - trace.due for trace in refused], 99),
            "of_it_sent_late_p99_ms": percentile_ms([trace.sent - trace.due for trace in refused], 99),
            "accepted_ttft_p99_ms": percentile_ms(
                [trace.pieces[0] - trace.due for trace in self.traces if trace.ok], 99
            ),
            "rss_growth_mib": round(self.growth_mib, 1),
        }


async def overload(
    url: str, seconds: float, turns: int, loads: list[float], server: psutil.Process
) -> list[dict[str, Any]]:
    """Run each load for `seconds` in total; rows of the capacity and of each load. Loads are interleaved, and each turn
    measures the capacity first: otherwise a machine that changes its speed would change the ratio of two loads."""
    endpoint = Endpoint(url, "", extra={"ignore_eos": True})
    endpoint.model = await endpoint.find_model()
    prompts = PromptMaker(MIX, 1, await tokens_per_word(endpoint))
    found = {times: Load() for times in loads}
    peaks = []
    for turn in range(turns):
        peak = rate(await run_level(endpoint, Level(concurrency=16), prompts, 200 if turn == 0 else 100))
        peaks.append(peak)
        for times, load in found.items():
            before = resident(server)
            level = Level(rate=times * peak)
            traces = await run_level(endpoint, level, prompts, round(times * peak * seconds / turns), turn)
            load.traces += traces
            load.shares.append(rate(traces) / peak)
            load.growth_mib += resident(server) - before
    capacity = {"load": "capacity", "goodput_per_s": round(float(np.mean(peaks)), 1)}
    return [capacity, *(load.row(times) for times, load in found.items())]


def missed(rows: list[dict[str, Any]], hostile: dict[str, Any]) -> list[str]:
    """The missed goals of R13 and R14, as sentences. Times at 10x are not judged: there the load tool is slow."""
    found = [f"{row['load']}: {row['failed']} requests failed" for row in rows[1:] if row["failed"]]
    first_tokens = {row["load"]: row["accepted_ttft_p99_ms"] for row in rows[1:]}
    for row in rows[1:]:
        if row["load"] == "3x" and row["goodput_share_of_capacity"] < 0.95:
            found.append("3x: goodput below 95 % of the capacity")
        if row["load"] in ("2x", "3x") and row["refused"] and row["refusal_p99_ms"] > 50:
            found.append(f"{row['load']}: refusals took more than 50 ms at p99")
        if row["load"] == "3x" and row["accepted_ttft_p99_ms"] > 2 * first_tokens.get("1x", float("inf")):
            found.append("3x: the first token took more than twice as long as at 1x")
    return found + ["hostile clients: 1 MiB per 100 or more is left"] * (hostile["rss_mib_per_100"] >= 1)


def attack(port: int, kind: int) -> None:
    """Run one malicious client of kind 0 to 5, and disconnect."""
    post = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
    body = b'{"model": "x", "prompt": "' + b"a" * 100_000
    sent = [
        post,  # headers without an end
        post + b"content-length: 100\r\n\r\n{",
        post + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 5000,
        post + b"content-length: 3000000\r\n\r\n" + body,
        b"GET / HTTP/1.1\r\n" + b"x-a: b\r\n" * 200 + b"\r\n",
        b"\x00\xff" * 2000,
    ][kind]
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(0.05)
        try:
            connection.sendall(sent)
            connection.recv(65536)
        except OSError:
            pass


def attacks(port: int, count: int, server: psutil.Process) -> dict[str, Any]:
    for number in range(60):  # warm up
        attack(port, number % 6)
    before = resident(server)
    for number in range(count):
        attack(port, number % 6)
    return {"attacks": count, "rss_mib_per_100": round((resident(server) - before) * 100 / count, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("engine")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--turns", type=int, default=1, help="rounds over which each load is spread")
    parser.add_argument("--loads", default="1,2,3,10", help="multiples of the capacity")
    parser.add_argument("--attacks", type=int, default=300)
    parser.add_argument("--max-wait", type=float, help="the server's --max-wait (default: none; the queue holds 32)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "icc.compiler.cli", "serve", arguments.engine, "--port", "0", "--max-queue", "32"]
    if arguments.max_wait is not None:
        command += ["--max-wait", str(arguments.max_wait)]
    with subprocess.Popen([*command, "--threads", "1"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+:(\d+)", process.stdout.readline())
            assert found, "the server did not start"
            server = psutil.Process(process.pid)
            loads = [float(times) for times in arguments.loads.split(",")]
            rows = asyncio.run(overload(found[0], arguments.seconds, arguments.turns, loads, server))
            hostile = attacks(int(found[1]), arguments.attacks, server)
            print(json.dumps({"overload": rows, "hostile": hostile}, indent=1))
            if arguments.check and (goals := missed(rows, hostile)):
                sys.exit("\n".join(goals))
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
