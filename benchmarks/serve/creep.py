"""RELIABILITY R15: a server under load for hours. Does it leak memory, files, threads or KV blocks?

    python benchmarks/serve/creep.py ENGINE [--minutes 120] [--round 30] [--rounds 8] [--json FILE] [--check]
        [--server SCRIPT]

Requests of many kinds come in rounds: completions, streams that are dropped, and malicious clients. After each round,
the idle server is measured: the memory, files and threads of all of its processes, and the KV blocks that an idle
engine has not released. A series creeps if in its second half it surely grows faster than its limit (slopes.py); with
--check the exit code is then 1, as it is if a request failed. SCRIPT runs in place of `icc serve`, such as
tests/runtime/server/leaky_server.py, which leaks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from icc.runtime.loadtest.endpoint import Endpoint
from icc.runtime.loadtest.load import Level, Mix, PromptMaker, run_level, tokens_per_word
from limits import attack
from slopes import creeping, settled

# growth per hour, from RELIABILITY
LIMITS = {"memory_mib": 1.0, "files": 0.0, "threads": 0.0, "blocks": 0.0}
MIX = Mix((16, 48), (1, 32), 8)
AT_ONCE, DROPPED, HOSTILE = 8, 4, 6  # clients of each kind in a batch of requests
IDLE_S = 30.0


class Watched:
    """A running server, and the resources that it holds."""

    def __init__(self, url: str, process: psutil.Process) -> None:
        self.url, self.port, self.process = url, int(url.rpartition(":")[2]), process
        self._healed, self._used, self._lost = 0.0, 0.0, 0.0

    def metrics(self) -> dict[str, float]:
        """The sum of each metric's samples, by name."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for name, value in re.findall(r"^([\w:]+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def wait_until_idle(self) -> dict[str, float]:
        """Wait until no request runs or waits; the metrics then. TimeoutError after IDLE_S seconds."""
        end = time.monotonic() + IDLE_S
        while time.monotonic() < end:
            now = self.metrics()
            if not now["icc:num_requests_running"] and not now["icc:num_requests_waiting"]:
                return now
            time.sleep(0.05)
        raise TimeoutError(f"requests are left {IDLE_S:g} s after the last")

    def sample(self) -> dict[str, float]:
        """The resources of the idle server, by the names of LIMITS."""
        self.wait_until_idle()
        time.sleep(0.2)  # until dropped connections are closed
        now = self.metrics()
        if now["icc:kv_healed_total"] > self._healed:  # the engine found lost blocks and reset its pool
            self._lost += max(self._used, 1.0)
        self._healed, self._used = now["icc:kv_healed_total"], self._blocks(now)
        processes = [self.process, *self.process.children(recursive=True)]
        return {
            "memory_mib": sum(process.memory_info().rss for process in processes) / 2**20,
            "files": sum(process.num_fds() for process in processes),
            "threads": sum(process.num_threads() for process in processes),
            "blocks": self._lost + self._used,
        }

    def _blocks(self, now: dict[str, float]) -> float:
        """Used blocks in thousandths of the cache, so that its size does not matter."""
        return round(1000 * now["icc:kv_cache_usage_perc"], 3)


def drop(port: int, count: int) -> None:
    """Start `count` streams and close each connection after its first bytes."""
    import socket

    body = json.dumps({"prompt": "a b c", "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(head % len(body) + body)
            connection.recv(1024)


async def load(watched: Watched, seconds: float, number: int, ratio: float) -> tuple[int, int]:
    """Send requests for `seconds`; the number of requests, and of completions that failed."""
    endpoint = Endpoint(watched.url, "", extra={"ignore_eos": True})
    endpoint.model = await endpoint.find_model()
    prompts, end = PromptMaker(MIX, number, ratio), time.monotonic() + seconds
    asked = failed = 0
    while time.monotonic() < end:
        traces = await run_level(endpoint, Level(concurrency=AT_ONCE), prompts, 4 * AT_ONCE)
        bad = [trace for trace in traces if trace.status != 200 or trace.error]
        failed += len(bad)
        if bad:
            print(f"{bad[0].status}: {bad[0].error}", file=sys.stderr, flush=True)
        await asyncio.to_thread(drop, watched.port, DROPPED)
        for kind in range(HOSTILE):
            await asyncio.to_thread(attack, watched.port, kind)
        asked += len(traces) + DROPPED + HOSTILE
    return asked, failed


async def ratio_of(url: str) -> float:
    endpoint = Endpoint(url, "", extra={"ignore_eos": True})
    endpoint.model = await endpoint.find_model()
    return await tokens_per_word(endpoint)


def watch(watched: Watched, minutes: float, round_s: float, rounds: int, limits: dict[str, float]) -> dict[str, Any]:
    """Alternate load and measurement for `minutes`, at least `rounds` times; the series, slopes and what creeps."""
    begin, hours, series = time.monotonic(), [], {name: [] for name in limits}
    requests = failed = 0
    ratio = asyncio.run(ratio_of(watched.url))
    while time.monotonic() < begin + 60 * minutes or len(hours) < rounds:
        asked, wrong = asyncio.run(load(watched, round_s, len(hours), ratio))
        requests, failed = requests + asked, failed + wrong
        for name, value in watched.sample().items():
            series[name].append(round(value, 3))
        hours.append((time.monotonic() - begin) / 3600)
        print(
            f"{60 * hours[-1]:7.1f} min",
            *(f"{name} {values[-1]:g}" for name, values in series.items()),
            file=sys.stderr,
            flush=True,
        )
    return {
        "minutes": round(60 * hours[-1], 1), "requests": requests, "failed": failed,
        "per_hour": {name: asdict(settled(hours, values)) for name, values in series.items()},
        "limits": limits, "creeps": sorted(creeping(hours, series, limits)),
        "hours": [round(hour, 5) for hour in hours], "series": series,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--round", type=float, default=30, help="seconds of load between two measurements")
    parser.add_argument("--rounds", type=int, default=8, help="minimum number of rounds")
    parser.add_argument("--memory", type=float, default=LIMITS["memory_mib"], help="allowed growth in MiB per hour")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--server", type=Path, help="a script to run with ENGINE in place of `icc serve`")
    parser.add_argument("--check", action="store_true", help="exit with 1 if something creeps or a request failed")
    options = parser.parse_args()
    command = [sys.executable, *([str(options.server)] if options.server else ["-m", "icc.compiler.cli", "serve"])]
    command += [options.engine, "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+:\d+", process.stdout.readline())
            if not found:
                sys.exit("the server did not start")
            watched = Watched(found[0], psutil.Process(process.pid))
            limits = {**LIMITS, "memory_mib": options.memory}
            result = watch(watched, options.minutes, options.round, options.rounds, limits)
        finally:
            process.terminate()
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    if options.check and (result["creeps"] or result["failed"]):
        sys.exit(f"creeps: {', '.join(result['creeps']) or 'nothing'}; {result['failed']} requests failed")


if __name__ == "__main__":
    main()
