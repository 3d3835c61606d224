"""Replicas with roles against replicas without, on long prompts among chats; and the simulator of `icc plan --traffic`
against both.

    python benchmarks/make_model.py smollm-135m build/smollm
    icc compile build/smollm -o build/smollm.engine --target native --quant rtn4 --max-seq-len 4608 --max-batch-size 16
    python benchmarks/serve/roles.py build/smollm.engine

Starts `icc serve --replicas 2` with and without `--prefill-replicas 1` in turns, one thread per replica, and sends both
the same requests at the same times: chats, and every so often a prompt of 4,000 tokens. Then it measures what steps of
the engine take, one replica alone, and simulates the same. Prints, for the chats alone and for all, times to the first
token and between tokens, and one JSON value. On a machine that others use, repeat it: --rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import icc
from icc.runtime.loadtest.endpoint import Endpoint, Trace
from icc.runtime.server.sizing.calibrate import calibrate
from icc.runtime.server.sizing.simulate import Fleet, prompts_of, simulate
from icc.runtime.server.sizing.sizing import percentiles
from icc.runtime.server.sizing.traffic import Arrival, read_traffic, write_traffic

WAYS = {"no roles": Fleet(2), "roles": Fleet(2, 1)}


def mix(given: argparse.Namespace) -> list[Arrival]:
    """Chats as a Poisson process, and long prompts at even distances among them."""
    source, found, at = random.Random(given.seed), list[Arrival](), 0.0
    while at < given.seconds:
        found.append(Arrival(at, given.chat_prompt, given.chat_answer))
        at += source.expovariate(given.chats_per_s)
    long_at = given.long_every / 2
    while long_at < given.seconds:
        found.append(Arrival(long_at, given.long_prompt, given.long_answer))
        long_at += given.long_every
    return sorted(found, key=lambda one: one.time)


async def ask_all(url: str, traffic: Sequence[Arrival]) -> list[Trace]:
    """All requests, each when it is due, by a server that knows already what a prompt costs."""
    endpoint = Endpoint(url, await Endpoint(url, "").find_model(), extra={"ignore_eos": True})
    warm = prompts_of([Arrival(0, 600, 8), *([Arrival(0, 64, 8)] * 3)])
    for prompt in [warm[0], *warm[1:]]:
        trace = await endpoint.ask([3 + token % 997 for token in prompt], 8, time.monotonic())  # of no request below
        assert trace.ok, trace.error
    prompts, begin, tasks = prompts_of(traffic), time.monotonic() + 0.5, list[asyncio.Task[Trace]]()
    for arrival, prompt in zip(traffic, prompts, strict=True):
        await asyncio.sleep(max(begin + arrival.time - time.monotonic(), 0))
        tasks.append(
            asyncio.create_task(
                endpoint.ask([3 + token % 1000 for token in prompt], arrival.output_tokens, begin + arrival.time)
            )
        )
    return list(await asyncio.gather(*tasks))


def serve(engine: Path, fleet: Fleet, traffic: Sequence[Arrival]) -> list[list[float]]:
    """The times of every request's tokens since it was due, by a server of its own."""
    options = ["--replicas", str(fleet.replicas), "--prefill-replicas", str(fleet.prefills), "--threads", "1"]
    command = [
        sys.executable,
        "-m",
        "icc.compiler.cli",
        "serve",
        str(engine),
        "--port",
        "0",
        "--watchdog",
        "60",
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"(http://\S+)", process.stdout.readline())
        assert found, "the server did not start"
        traces = asyncio.run(ask_all(found[1], traffic))
        assert all(trace.ok for trace in traces), [trace.error for trace in traces if not trace.ok]
        return [[at - trace.due for at in trace.pieces] for trace in traces]
    finally:
        process.terminate()
        process.wait()


def figures(traffic: Sequence[Arrival], times: Sequence[Sequence[float]], long: int) -> dict[str, dict[str, float]]:
    """Milliseconds, by percentile: of chats, and of all requests."""
    found: dict[str, dict[str, float]] = {}
    for name, most in (("chats", long - 1), ("all", 1 << 30)):
        some = [one for arrival, one in zip(traffic, times, strict=True) if arrival.prompt_tokens <= most]
        gaps = [after - before for one in some for before, after in pairwise(one)]
        for what, values in (("ttft", [one[0] for one in some]), ("itl", gaps)):
            found[f"{name} {what}"] = {key: round(1e3 * value, 1) for key, value in percentiles(values).items()}
    return found


def simulated(engine: Path, traffic: Sequence[Arrival], long: int) -> dict[str, dict[str, dict[str, float]]]:
    """The same figures by the simulator."""
    with icc.load(engine, threads=1, spec="none") as llm:
        table = calibrate(llm)
    found = {}
    for way, fleet in WAYS.items():
        served = simulate(table, traffic, fleet)
        found[way] = figures(traffic, [[at - one.arrival.time for at in one.times] for one in served], long)
    return found


def main() -> None:
    """Rounds of both ways in turns, and then the simulator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    sizes = {"chat_prompt": 48, "chat_answer": 96, "long_prompt": 4000, "long_answer": 16, "rounds": 1, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    for name, default in (("seconds", 120.0), ("chats_per_s", 1.0), ("long_every", 30.0)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=default)
    parser.add_argument("--traffic", type=Path, help="these requests instead of a mix")
    parser.add_argument("--write-traffic", type=Path, help="write the requests here, for `icc plan --traffic`")
    given = parser.parse_args()
    traffic = mix(given) if given.traffic is None else read_traffic(given.traffic)
    if given.write_traffic:
        write_traffic(given.write_traffic, traffic)
    runs: dict[str, list[dict[str, dict[str, float]]]] = {way: [] for way in WAYS}
    for _ in range(given.rounds):
        for way, fleet in WAYS.items():
            before = os.getloadavg()[0]
            runs[way].append(figures(traffic, serve(given.engine, fleet, traffic), given.long_prompt))
            print(f"{way:9} load before {before:.1f} {runs[way][-1]}", file=sys.stderr, flush=True)
    real = {
        way: {what: {p: statistics.median(run[what][p] for run in found) for p in found[0][what]} for what in found[0]}
        for way, found in runs.items()
    }
    modelled = simulated(given.engine, traffic, given.long_prompt)
    ratio = {what: round(real["roles"][what]["p99"] / real["no roles"][what]["p99"], 3) for what in real["roles"]}
    off = {
        way: {what: {p: round(modelled[way][what][p] / value - 1, 3) for p, value in found.items() if value}
              for what, found in real[way].items()}
        for way in WAYS
    }  # fmt: skip
    print(json.dumps({"requests": len(traffic), "real": real, "simulated": modelled, "off": off, "p99_ratio": ratio}))


if __name__ == "__main__":
    main()
