"""What Ray Serve costs a server: the time to the first token of one stream, and the tokens per second of 32 streams.

    icc compile samples/pystd -o build/pystd.engine --target native --quant rtn4 --max-seq-len 1024 --max-batch-size 32
    python benchmarks/clusters/overhead.py build/pystd.engine --replicas 1,2

`icc serve` and `icc serve --ray` (a cluster on this machine) both run all the time; rounds alternate between them.
A ratio is the median of the ratios within the rounds, a difference the median of the differences. With more than one
replica, Ray's HAProxy asks icc's router where each request goes. Prints a line per round, and one JSON value.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time

import ray  # noqa: F401  (what is measured; fails at once if it is missing)
from icc.runtime.loadtest.endpoint import Endpoint
from servers import Server, started


async def first_tokens(server: Server, requests: int, seed: int) -> float:
    """The median seconds to the first text of requests that are sent one after the other."""
    endpoint, found = Endpoint(server.url, server.model, extra={"ignore_eos": True, "temperature": 0}), []
    for number in range(requests):
        now = asyncio.get_running_loop().time()
        trace = await endpoint.ask([3 + seed % 50, 4 + number % 50, *range(3, 30)], 4, now)
        assert trace.ok, trace.error
        found.append(min([*trace.pieces[:1], *trace.silent[:1]]) - now)
    return statistics.median(found)


async def throughput(server: Server, streams: int, tokens: int, seed: int) -> float:
    """Tokens per second of `streams` streams that begin together."""
    endpoint = Endpoint(server.url, server.model, extra={"ignore_eos": True, "temperature": 0})
    begin = asyncio.get_running_loop().time()
    prompts = [[3 + seed % 50, 3 + number, *range(3, 20)] for number in range(streams)]
    traces = await asyncio.gather(*(endpoint.ask(prompt, tokens, begin) for prompt in prompts))
    assert all(trace.ok for trace in traces), [trace.error for trace in traces if trace.error][:1]
    return sum(trace.output_tokens for trace in traces) / (asyncio.get_running_loop().time() - begin)


async def cached(server: Server) -> float:
    """The share of reusable prompt tokens that prefix caches served, in the later turns of eight interleaved chats."""
    endpoint, found = Endpoint(server.url, server.model, extra={"ignore_eos": True, "temperature": 0}), []
    for turn in range(1, 5):
        for chat in range(8):
            prompt = [3 + (chat * 7 + place * (chat + 3)) % 200 for place in range(128 * turn)]
            trace = await endpoint.ask(prompt, 2, asyncio.get_running_loop().time())
            assert trace.ok, trace.error
            found += [(trace.cached_tokens, trace.prompt_tokens - 128)] * (turn > 1)
        await asyncio.sleep(1.5)  # replicas report their caches meanwhile
    return sum(hit for hit, _ in found) / sum(most for _, most in found)


def compare(given: argparse.Namespace, replicas: int) -> dict:
    """Measure both servers with `replicas` replicas, interleaved; medians, ratios and differences."""
    rounds: list[dict[str, float]] = []
    each = ["--replicas", str(replicas), "--threads", "1"]
    with started(given.engine, each) as raw, started(given.engine, [*each, "--ray", "--ray-cpus", "0.5"]) as on_ray:
        for server in (raw, on_ray):  # warm caches and connections
            asyncio.run(throughput(server, 4, 4, 0))
        shares = {name: round(asyncio.run(cached(one)), 3) for name, one in (("raw", raw), ("ray", on_ray))}
        print(f"{replicas} replicas  prompts out of the caches {shares}", flush=True)
        for number in range(given.rounds):
            found = {}
            pairs = [("raw", raw), ("ray", on_ray)]
            for name, server in pairs if number % 2 else reversed(pairs):
                found[f"{name}_first_ms"] = 1e3 * asyncio.run(first_tokens(server, given.requests, number))
                found[f"{name}_tokens_s"] = asyncio.run(throughput(server, given.streams, given.tokens, number))
            rounds.append({key: round(value, 2) for key, value in found.items()})
            print(f"{replicas} replicas  {rounds[-1]}", flush=True)
    return {
        "replicas": replicas,
        "first_ms": statistics.median(one["raw_first_ms"] for one in rounds),
        "added_ms": round(statistics.median(one["ray_first_ms"] - one["raw_first_ms"] for one in rounds), 2),
        "tokens_s": statistics.median(one["raw_tokens_s"] for one in rounds),
        "ratio": round(statistics.median(one["ray_tokens_s"] / one["raw_tokens_s"] for one in rounds), 3),
        "cached": shares,
        "rounds": rounds,
    }


def main() -> None:
    """Read the command line, measure, print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--replicas", default="1,2")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    found = [compare(given, int(number)) for number in given.replicas.split(",")]
    print(json.dumps({"when": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[0], "found": found}))


if __name__ == "__main__":
    main()
