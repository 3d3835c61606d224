"""Chats of several turns over replicas: the time to the first token if prompts go to the replica that has cached their
beginning, and if they go to the replicas round robin.

    python benchmarks/make_model.py smollm-135m build/smollm
    icc compile build/smollm -o build/smollm.engine --target native --quant rtn4 --max-seq-len 2048 --max-batch-size 16
    python benchmarks/serve/replicas.py build/smollm.engine --replicas 2 --chats 32 --turns 10

Starts `icc serve --replicas` itself, alternating between the routings. A chat's prompt is the whole conversation,
answers included, and some new tokens; a pause follows each answer. Each chat allows only one token in its answers, so
that it knows their tokens. Prints a line per run, and one JSON value.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Sequence

from icc.runtime.loadtest.endpoint import Endpoint

# `icc serve` with a round-robin router
ROUND_ROBIN = """
import sys
from itertools import count
from icc.compiler.cli import main
from icc.runtime.server.engine.router import CHUNK, Router
turns = count()
def choose(self, keys, length, loads):
    load = loads[next(turns) % len(loads)]
    return load, max(length - CHUNK * self._matched(load.replica, keys), 1)
Router.choose = choose
sys.exit(main())
"""


async def chat(url: str, model: str, number: int, given: argparse.Namespace, first: list[float]) -> None:
    """Run one conversation; append the seconds to the first token of each answer except the first to `first`."""
    source, said = random.Random(number), 3 + number
    endpoint = Endpoint(url, model, extra={"ignore_eos": True, "temperature": 0, "allowed_token_ids": [said]})
    prompt: list[int] = [source.randrange(3, 1000) for _ in range(given.system)]
    await asyncio.sleep(source.random() * given.pause)
    for turn in range(given.turns):
        prompt += [source.randrange(3, 1000) for _ in range(given.said)]
        start = asyncio.get_running_loop().time()
        trace = await endpoint.ask(prompt, given.answer, start)
        assert trace.ok, trace.error
        if turn:
            first.append(min([*trace.pieces[:1], *trace.silent[:1]]) - start)
        assert trace.output_tokens == given.answer
        prompt += [said] * given.answer
        await asyncio.sleep(source.expovariate(1 / given.pause))


async def chats(url: str, given: argparse.Namespace) -> list[float]:
    """Run all chats; their times to the first token, in seconds."""
    model, first = await Endpoint(url, "").find_model(), list[float]()
    await asyncio.gather(*(chat(url, model, number, given, first) for number in range(given.chats)))
    return first


def measure(command: Sequence[str], given: argparse.Namespace) -> dict[str, float]:
    """One run on a new server: percentiles in ms, and the share of prompt tokens in the prefix cache."""
    options = ["serve", str(given.engine), "--port", "0", "--replicas", str(given.replicas), "--threads", "1"]
    options += ["--watchdog", "60"]  # on a shared machine a step may take seconds
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"(http://\S+)", process.stdout.readline())
        assert found, "the server did not start"
        first = sorted(asyncio.run(chats(found[1], given)))
        with urllib.request.urlopen(f"{found[1]}/metrics") as answer:
            text = answer.read().decode()
        tokens = {n: float(re.findall(rf"^icc:{n}_total\{{[^}}]*\}} (\S+)$", text, re.M)[0])
                  for n in ("prefix_cache_hits", "prefix_cache_queries")}  # fmt: skip
        share = tokens["prefix_cache_hits"] / tokens["prefix_cache_queries"]
        p50, p90 = statistics.median(first), first[int(0.9 * len(first))]
        return {"p50_ms": round(1e3 * p50, 1), "p90_ms": round(1e3 * p90, 1), "cached": round(share, 3)}
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Run rounds that alternate between both routings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    for name, default in (("replicas", 2), ("chats", 32), ("turns", 10), ("system", 100), ("said", 48), ("answer", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pause", type=float, default=4.0, help="mean seconds between an answer and the next prompt")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    ways = {
        "by beginnings": [sys.executable, "-m", "icc.compiler.cli"],
        "in turns": [sys.executable, "-c", ROUND_ROBIN],
    }
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(given.rounds):
        for way, command in ways.items():
            found[way].append(measure(command, given))
            print(f"{way:14} {found[way][-1]}", file=sys.stderr, flush=True)
    medians = {
        way: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for way, runs in found.items()
    }
    ratio = medians["by beginnings"]["p50_ms"] / medians["in turns"]["p50_ms"]
    print(json.dumps({"medians": medians, "p50_ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()
