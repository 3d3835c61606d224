"""Do waiting requests slow running ones? The time of a step with a full batch, and an empty or a full queue.

    python benchmarks/serve/waiting.py ENGINE [--waiting 1000] [--seconds 7] [--rounds 3]

Starts `icc serve` itself and fills its batch with long answers. Prints one JSON value: milliseconds per step, from the
server's own histogram and as its clients see it (from the tokens of all streams), alternating between an empty and a
full queue. The answers grow meanwhile and steps become slower, so a ratio is to the mean of the turns before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
import urllib.request

from icc.runtime.loadtest.endpoint import Endpoint
from icc.runtime.loadtest.load import Mix, PromptMaker

BATCH = 16


class Figures:
    """The server's metrics."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, name: str) -> float:
        with urllib.request.urlopen(f"{self._url}/metrics") as answer:
            found = re.search(rf"^icc:{name}\{{[^}}]*\}} (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found, name
        return float(found[1])

    async def until(self, name: str, value: float) -> None:
        while await asyncio.to_thread(self.get, name) != value:
            await asyncio.sleep(0.1)

    async def step_ms(self, seconds: float) -> dict[str, float]:
        """Over `seconds`: the mean milliseconds of a step by the server's clock, and as seen from outside."""
        names = ("iteration_seconds_sum", "iteration_seconds_count", "generation_tokens_total")
        before, start = [await asyncio.to_thread(self.get, name) for name in names], time.monotonic()
        await asyncio.sleep(seconds)
        after, passed = [await asyncio.to_thread(self.get, name) for name in names], time.monotonic() - start
        total, steps, tokens = (new - old for new, old in zip(after, before, strict=True))
        return {"step_ms": 1e3 * total / steps, "outside_ms": 1e3 * passed * BATCH / tokens}


async def measure(url: str, waiting: int, seconds: float, rounds: int) -> list[dict[str, float]]:
    endpoint, figures = Endpoint(url, "", extra={"ignore_eos": True}), Figures(url)
    endpoint.model = await endpoint.find_model()
    prompts = PromptMaker(Mix((64, 64), (1, 1)), 1, 1.0)
    running = [asyncio.create_task(endpoint.ask(prompts.draw()[0], 4000, 0)) for _ in range(BATCH)]
    await figures.until("num_requests_running", BATCH)
    rows = []
    for count in (*(0, waiting) * rounds, 0):
        queued = [asyncio.create_task(endpoint.ask(prompts.draw()[0], 4, 0)) for _ in range(count)]
        await figures.until("num_requests_waiting", count)
        rows.append({"waiting": count, **await figures.step_ms(seconds)})
        print(rows[-1], file=sys.stderr, flush=True)
        for task in queued:
            task.cancel()
        await asyncio.gather(*queued, return_exceptions=True)
        await figures.until("num_requests_waiting", 0)
    for task in running:
        task.cancel()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    for name, kind, default in (("waiting", int, 1000), ("seconds", float, 7.0), ("rounds", int, 3)):
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--threads", type=int, default=2)
    a = parser.parse_args()
    command = [sys.executable, "-m", "icc.compiler.cli", "serve", a.engine, "--port", "0", "--threads", str(a.threads)]
    with subprocess.Popen([*command, "--max-queue", str(a.waiting + 8)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, "the server did not start"
            rows = asyncio.run(measure(found[0], a.waiting, a.seconds, a.rounds))
        finally:
            process.terminate()
    times = [row["step_ms"] for row in rows]
    ratios = [2 * times[i] / (times[i - 1] + times[i + 1]) for i in range(1, len(times), 2)]
    print(json.dumps({"rows": rows, "full_over_empty": {"median": statistics.median(ratios), "all": ratios}}, indent=1))


if __name__ == "__main__":
    main()
