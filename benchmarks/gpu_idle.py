"""How long this machine's GPU waits for the host: 64 sequences that come and go, with and without scheduling ahead.

    python benchmarks/gpu_idle.py --target h100
    python benchmarks/gpu_idle.py --target h100 --engine build/gpu/llama-8b-awq4.engine

CUDA events enclose each step on the stream, from its first copy to its last; the time between the end of a step and the
beginning of the next is idle time. With --trace, torch's profiler measures the same for single kernels: the share of
time in which any kernel or copy runs, and the share in gaps of 20 us and more. The host's time per step is that of
`EngineLoop.step` without the wait for the device. Without --engine, a random checkpoint of --shape is compiled to
--work, for 64 sequences and 512 tokens per step. Needs torch with CUDA, cuda-bindings, and icc on the path.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
from icc.runtime.requests.request import Request
from make_model import write

SEQUENCES, STEP_TOKENS, MOST_EVENTS = 64, 512, 1 << 16


def main() -> int:
    """Measure, print a line of JSON per run, and whether the goal is met; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--engine", type=Path, help="an engine directory of this target")
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--quant", default="rtn4")
    parser.add_argument("--work", type=Path, default=Path("build/gpu"))
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of each run")
    parser.add_argument("--trace", action="store_true", help="trace one more run by torch's profiler")
    a = parser.parse_args()
    engine = a.engine or compiled(a)
    shares = {}
    with icc.load(engine, verify=False) as llm:
        gc.collect()
        gc.freeze()  # as `icc serve` does
        for name, ahead in (("warm", True), ("one by one", False), ("ahead", True)):
            found = measure(llm, a.seconds, ahead)
            shares[name] = found["idle"]
            print(json.dumps({"run": name} | found), flush=True)
        if a.trace:
            print(json.dumps({"run": "traced"} | traced(llm, a.seconds)), flush=True)
    good = shares["ahead"] < 0.03
    print(f"{'ok' if good else 'MISSED'}: idle {shares['ahead']:.1%} (goal 3 %), one by one {shares['one by one']:.1%}")
    return int(not good)


def compiled(a: argparse.Namespace) -> Path:
    """Compile an engine with random weights unless it exists; its path."""
    model, engine = a.work / a.shape, a.work / f"{a.shape}-{a.quant}-64.engine"
    if not (model / "model.safetensors").is_file():
        write(a.shape, model, device="cuda")
    if not (engine / "engine.json").is_file():
        start = time.perf_counter()
        limits = {"max_seq_len": 1024, "max_batch_size": SEQUENCES, "max_step_tokens": STEP_TOKENS}
        icc.compile(model, engine, target=a.target, quant=a.quant, **limits)
        print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    return engine


class Watch:
    """Records events and host times around the steps of a CUDA device, inside a `with` block."""

    def __init__(self, llm: icc.LLM) -> None:
        self.device: Any = llm.loop.executor.device  # type: ignore[attr-defined]
        self.cuda = self.device.cuda
        self.begins: list[Any] = []
        self.ends: list[Any] = []
        self.waited = 0.0
        self.mixed = 0

    def __enter__(self) -> Watch:
        send, fetch, run, wait = self.device.send, self.device.fetch, self.device.run, self.device.wait

        def begin(*args: Any) -> None:
            self.device.cuda.enter()
            self.begins.append(self._mark())
            send(*args)

        def end(*args: Any) -> None:
            fetch(*args)
            self.ends.append(self._mark())

        def count(work: Any) -> None:
            self.mixed += not work.phase.decode
            run(work)

        def timed(turn: int) -> None:
            start = time.perf_counter()
            wait(turn)
            self.waited += time.perf_counter() - start

        self.device.send, self.device.fetch, self.device.run, self.device.wait = begin, end, count, timed
        return self

    def __exit__(self, *error: object) -> None:
        for name in ("send", "fetch", "run", "wait"):
            delattr(self.device, name)
        self.cuda.wait()

    def _mark(self) -> Any:
        event = self.cuda.call("cuEventCreate", self.cuda.api.CUevent_flags.CU_EVENT_DEFAULT)
        self.cuda.record(event)
        return event

    def steps_and_gaps(self) -> tuple[list[float], list[float]]:
        """Milliseconds of each step, and of the gap before each step except the first."""
        elapsed: Callable[..., float] = lambda a, b: self.cuda.call("cuEventElapsedTime", a, b)  # noqa: E731
        steps = [elapsed(*pair) for pair in zip(self.begins, self.ends, strict=True)]
        gaps = [max(elapsed(*pair), 0.0) for pair in zip(self.ends, self.begins[1:], strict=False)]
        for event in (*self.begins, *self.ends):
            self.cuda.call("cuEventDestroy", event)
        return steps, gaps


def measure(llm: icc.LLM, seconds: float, ahead: bool) -> dict[str, Any]:
    """Run 64 sequences for `seconds`; counts, idle share and times. ahead: schedule the next step during a step."""
    original = llm.loop.requests.schedule_ahead
    if not ahead:
        llm.loop.requests.schedule_ahead = lambda: None  # type: ignore[method-assign]
    try:
        with Watch(llm) as watch:
            total, tokens, number = serve(llm, seconds)
    finally:
        llm.loop.requests.schedule_ahead = original  # type: ignore[method-assign]
    steps, gaps = watch.steps_and_gaps()
    return {
        "steps": number, "mixed": watch.mixed, "tokens_per_s": round(tokens / total),
        "idle": round(sum(gaps) / (sum(gaps) + sum(steps)), 4), "median_step_ms": round(statistics.median(steps), 3),
        "median_gap_ms": round(statistics.median(gaps), 4), "worst_gap_ms": round(max(gaps), 3),
        "host_ms_per_step": round(1e3 * (total - watch.waited) / number, 3),
    }  # fmt: skip


def serve(llm: icc.LLM, seconds: float) -> tuple[float, int, int]:
    """Replace each request that ends, with four waiting, and cancel some; (seconds, tokens, steps)."""
    source, live = random.Random(0), []
    vocab = llm.manifest.model.vocab_size
    longest = min(llm.manifest.limits.max_seq_len - 320, 600)

    def arrive() -> None:
        prompt = [source.randrange(3, vocab) for _ in range(source.randint(20, longest))]
        warm = {"temperature": 0.8, "top_p": 0.95, "seed": source.randrange(1 << 30)}
        kind: dict[str, Any] = source.choice([{"temperature": 0.0}, warm])
        live.extend(
            llm.loop.add(prompt, icc.SamplingParams(max_tokens=source.randint(50, 300), ignore_eos=True, **kind))
        )

    start, tokens, number = time.perf_counter(), 0, 0
    while (now := time.perf_counter()) - start < seconds and number < MOST_EVENTS:
        while len(live) < SEQUENCES + 4:
            arrive()
        outputs = llm.loop.step()
        tokens, number = tokens + len(outputs), number + 1
        if any(output.finish_reason for output in outputs):
            live[:] = [request for request in live if request.finish_reason is None]
        if source.random() < 0.01:
            end(llm, live.pop(source.randrange(len(live))))
    for request in live:
        end(llm, request)
    while llm.loop.has_work():
        llm.loop.step()
    return now - start, tokens, number


def end(llm: icc.LLM, request: Request) -> None:
    """Cancel a request."""
    llm.loop.end(request)


def traced(llm: icc.LLM, seconds: float) -> dict[str, Any]:
    """Kernels, busy share and share of long gaps, by torch's profiler, which slows the host down."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        serve(llm, seconds / 4)
    spans = sorted((e.time_range.start, e.time_range.end) for e in found.events() if e.device_type.name == "CUDA")
    busy, waits, last = 0.0, 0.0, spans[0][0]
    for begin, stop in spans:
        waits += max(begin - last, 0.0) if begin - last >= 20 else 0.0
        busy += max(stop - max(begin, last), 0.0)
        last = max(last, stop)
    total = last - spans[0][0]
    return {"kernels": len(spans), "busy": round(busy / total, 4), "gaps_of_20_us": round(waits / total, 4)}


if __name__ == "__main__":
    raise SystemExit(main())
