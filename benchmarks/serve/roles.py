"""Replicas with roles (prefill, decode) against replicas without, on long prompts among chats; and the simulator of
`icc plan --traffic` against both.

    python benchmarks/make_model.py smollm-135m build/smollm
    icc compile build/smollm -o build/smollm.engine --target native --quant rtn4 --max-seq-len 4608 --max-batch-size 16
    python benchmarks/serve/roles.py build/smollm.engine

First it measures the engine's steps, in as many processes at once as there are replicas, because these share memory
bandwidth, and simulates the requests with and without roles. Then it alternates between `icc serve --replicas 2` with
and without `--prefill-replicas 1`, one thread per replica, and sends both the same requests at the same times: chats,
and at regular intervals prompts of 4,000 tokens. For chats alone and for all requests it prints the times to the first
token and between tokens, by percentile: measured, simulated, and the simulator's error.

It ends within --minutes: requests arrive for as long as that permits (at most --seconds). Results are written to --out
after every part, so that an interrupted run keeps them. On a shared machine, repeat it with --rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from icc.runtime.loadtest.endpoint import Endpoint, Trace
from icc.runtime.parent import die_with_parent
from icc.runtime.server.sizing.simulate import Fleet, prompts_of, simulate
from icc.runtime.server.sizing.sizing import percentiles
from icc.runtime.server.sizing.step_table import StepTable
from icc.runtime.server.sizing.traffic import Arrival, read_traffic, write_traffic

WAYS = {"no roles": Fleet(2), "roles": Fleet(2, 1)}
Figures = dict[str, dict[str, float]]  # milliseconds by name and percentile
_START_S = 15.0  # for a server to start, warm up and end


def mix(given: argparse.Namespace, seconds: float) -> list[Arrival]:
    """Chats as a Poisson process over `seconds`, and long prompts at even intervals among them."""
    source, found, at = random.Random(given.seed), list[Arrival](), 0.0
    while at < seconds:
        found.append(Arrival(at, given.chat_prompt, given.chat_answer))
        at += source.expovariate(given.chats_per_s)
    long_at = given.long_every / 2
    while long_at < seconds:
        found += [Arrival(long_at, given.long_prompt, given.long_answer)] * given.long_together
        long_at += given.long_every
    return sorted(found, key=lambda one: one.time)


# -- simulated -------------------------------------------------------------------------------------------------------


def measured_steps(engine: Path, count: int) -> StepTable:
    """Step times while `count` processes run steps at once: the mean of all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_traffic(folder / "traffic", [Arrival(0.0, 16, 2)])
        command = [sys.executable, "-m", "icc.compiler.cli", "plan", str(engine), "--traffic", str(folder / "traffic")]
        command += ["--slo", "ttft=1000s,itl=1000s", "--threads", "1", "--write-step-costs"]
        running = [
            subprocess.Popen(
                [*command, str(folder / f"{n}")],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if n else None,  # one of them shows its progress
                preexec_fn=die_with_parent,
            )
            for n in range(count)
        ]
        assert not any([process.wait() for process in running]), "the steps could not be measured"
        return mean_table([StepTable.read(folder / f"{n}") for n in range(count)])


def mean_table(tables: Sequence[StepTable]) -> StepTable:
    """The mean of several processes' measurements of one engine."""
    mean: Any = lambda name: statistics.mean(getattr(table, name) or 0.0 for table in tables)  # noqa: E731
    points: Any = lambda name: [  # noqa: E731
        (at[0][0], statistics.mean(seconds for _, seconds in at))
        for at in zip(*(getattr(table, name) for table in tables), strict=True)
    ]
    scalars = {name: mean(name) for name in ("decode_context", "prompt_context", "row")}
    moves = {name: mean(name) if tables[0].taken is not None else None for name in ("taken", "given")}
    return msgspec.structs.replace(tables[0], decode=points("decode"), prompt=points("prompt"), **scalars, **moves)


def simulated(table: StepTable, traffic: Sequence[Arrival], long: int) -> tuple[dict[str, Figures], float]:
    """The simulated figures of both ways, and the time in seconds at which the last answer ends in either."""
    found, last = dict[str, Figures](), 0.0
    for way, fleet in WAYS.items():
        served = simulate(table, traffic, fleet)
        found[way] = figures(traffic, [[at - one.arrival.time for at in one.times] for one in served], long)
        last = max(last, *(one.times[-1] for one in served))
    return found, last


# -- measured --------------------------------------------------------------------------------------------------------


async def ask_all(url: str, traffic: Sequence[Arrival]) -> list[Trace]:
    """Send all requests, each when it is due, after some others by which the server learns the cost of prompts."""
    endpoint = Endpoint(url, await Endpoint(url, "").find_model(), extra={"ignore_eos": True})
    for prompt in prompts_of([Arrival(0, 600, 8), *([Arrival(0, 64, 8)] * 3)]):
        trace = await endpoint.ask([3 + token % 997 for token in prompt], 8, time.monotonic())  # shares no prefix
        assert trace.ok, trace.error
    prompts, begin, tasks = prompts_of(traffic), time.monotonic() + 0.5, list[asyncio.Task[Trace]]()
    for arrival, prompt in zip(traffic, prompts, strict=True):
        await asyncio.sleep(max(begin + arrival.time - time.monotonic(), 0))
        asked = endpoint.ask([3 + token % 1000 for token in prompt], arrival.output_tokens, begin + arrival.time)
        tasks.append(asyncio.create_task(asked))
    return list(await asyncio.gather(*tasks))


def token_times(trace: Trace) -> list[float]:
    """The time of each token, also of those without text, such as a part of a character."""
    found = trace.silent if trace.pieces is trace.silent else sorted([*trace.pieces, *trace.silent])
    return found[: trace.output_tokens]  # the stream's last event may have no token


def serve(engine: Path, fleet: Fleet, traffic: Sequence[Arrival]) -> list[list[float]]:
    """Run the traffic on a new server; for each request, the seconds from its due time to each token."""
    command = [sys.executable, "-m", "icc.compiler.cli", "serve", str(engine), "--port", "0", "--watchdog", "60"]
    command += ["--spec", "none", "--threads", "1", "--replicas", str(fleet.replicas)]
    command += ["--prefill-replicas", str(fleet.prefills)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=die_with_parent
    )
    try:
        assert process.stdout is not None
        found = re.search(r"(http://\S+)", process.stdout.readline())
        assert found, "the server did not start"
        traces = asyncio.run(ask_all(found[1], traffic))
        assert all(trace.ok for trace in traces), [trace.error for trace in traces if not trace.ok]
        return [[at - trace.due for at in token_times(trace)] for trace in traces]
    finally:
        process.terminate()
        process.wait()


# -- both ------------------------------------------------------------------------------------------------------------


def figures(traffic: Sequence[Arrival], times: Sequence[Sequence[float]], long: int) -> Figures:
    """Milliseconds to the first token and between tokens, by percentile, of chats and of all requests."""
    found: Figures = {}
    for name, most in (("chats", long - 1), ("all", 1 << 30)):
        some = [one for arrival, one in zip(traffic, times, strict=True) if arrival.prompt_tokens <= most]
        gaps = [after - before for one in some for before, after in pairwise(one)]
        for what, values in (("ttft", [one[0] for one in some if one]), ("itl", gaps)):
            found[f"{name} {what}"] = {key: round(1e3 * value, 1) for key, value in percentiles(values).items()}
    return found


def medians(runs: Sequence[Figures]) -> Figures:
    """The median over all rounds of each figure."""
    return {
        what: {p: statistics.median(run[what][p] for run in runs) for p in found} for what, found in runs[0].items()
    }


class Results:
    """The results so far, written to a file after every part."""

    def __init__(self, path: Path, requests: int, modelled: dict[str, Figures]) -> None:
        self._path, self._requests, self._modelled = path, requests, modelled
        self._runs: dict[str, list[Figures]] = {way: [] for way in WAYS}
        self._write()

    def add(self, way: str, found: Figures) -> None:
        """Add a run, and print the medians beside the simulated figures."""
        self._runs[way].append(found)
        for what, values in medians(self._runs[way]).items():
            modelled = self._modelled[way][what]
            shown = (
                f"{p} {v:9.1f} simulated {modelled[p]:9.1f} {modelled[p] / v - 1:+6.0%}" for p, v in values.items() if v
            )
            print(f"{way:9}{what:11}" + "   ".join(shown), flush=True)
        self._write()

    def _write(self) -> None:
        real = {way: medians(runs) for way, runs in self._runs.items() if runs}
        off = {
            way: {what: {p: round(self._modelled[way][what][p] / v - 1, 3) for p, v in values.items() if v}
                  for what, values in found.items()}
            for way, found in real.items()
        }  # fmt: skip
        known = {"requests": self._requests, "real": real, "simulated": self._modelled, "off": off, "runs": self._runs}
        for name, found in (("p99_ratio", real), ("p99_ratio_simulated", self._modelled)):
            if len(found) == len(WAYS):
                ratios = {
                    what: (found["roles"][what].get("p99"), found["no roles"][what].get("p99"))
                    for what in found["roles"]
                }
                known[name] = {what: round(one / other, 3) for what, (one, other) in ratios.items() if one and other}
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(known, indent=1) + "\n")
        part.replace(self._path)
        self.known = known


def main() -> None:
    """Run the simulator, then rounds that alternate between both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    sizes = {"chat_prompt": 48, "chat_answer": 96, "long_prompt": 4000, "long_answer": 16, "long_together": 1}
    for name, default in {**sizes, "rounds": 1, "seed": 0}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    for name, default in (("seconds", 150.0), ("chats_per_s", 1.0), ("long_every", 30.0), ("minutes", 9.0)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=default)
    parser.add_argument("--out", type=Path, default=Path("build/roles.json"), help="written after every part")
    parser.add_argument("--step-costs", type=Path, help="a file of `icc plan --write-step-costs`; default: measure")
    parser.add_argument("--traffic", type=Path, help="use the requests of this file instead of a mix")
    parser.add_argument("--write-traffic", type=Path, help="write the requests here, for `icc plan --traffic`")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that its server ends, too
    end = time.monotonic() + 60 * given.minutes
    count = WAYS["roles"].replicas
    table = measured_steps(given.engine, count) if given.step_costs is None else StepTable.read(given.step_costs)
    room = (end - time.monotonic()) / (len(WAYS) * given.rounds) - _START_S
    traffic = mix(given, min(given.seconds, room)) if given.traffic is None else read_traffic(given.traffic)
    modelled, last = simulated(table, traffic, given.long_prompt)
    if given.traffic is None and last > room:  # the last requests must also end in time
        traffic = mix(given, max(min(given.seconds, room) - (last - room), 1.0))
        modelled, last = simulated(table, traffic, given.long_prompt)
    if given.write_traffic:
        write_traffic(given.write_traffic, traffic)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    results = Results(given.out, len(traffic), modelled)
    print(f"{len(traffic)} requests in {traffic[-1].time:.0f} s, simulated until {last:.0f} s", flush=True)
    for number in range(given.rounds):
        for way, fleet in WAYS.items():
            print(f"round {number + 1}, {way}: load before {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
            results.add(way, figures(traffic, serve(given.engine, fleet, traffic), given.long_prompt))
    print(json.dumps(results.known))


if __name__ == "__main__":
    main()
