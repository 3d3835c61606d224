"""llama.cpp on the frontier's text, and its speed beside icc's at batch 1 with one thread.

    PEER=/path/to/python/with/llama_cpp      # and in LLAMA_CPP_LIB_PATH a build of llama.cpp for this machine
    $PEER benchmarks/frontier_peers.py quantize SmolLM2.gguf q4km.gguf 15  # 2: Q4_0, 12: Q3_K_M, 30: IQ4_XS
    $PEER benchmarks/frontier_peers.py perplexity windows.json q4km.gguf q40.gguf
    python benchmarks/frontier_peers.py speed $PEER A.engine,B.engine q4km.gguf,q40.gguf
    python benchmarks/frontier_peers.py batch1 $PEER windows.json A.engine,B.engine q4km.gguf,q40.gguf OUT.md

`frontier.py --write-windows` writes windows.json. Speed: 128 greedy tokens after 32, CPU time, five interleaved rounds,
each engine in its own process. batch1: perplexity of all on the same windows, and then the speed, in one run; for each
engine the ratio to the fastest file that does not predict better (exit code 1 if no engine reaches 1.3).
Only `speed`, `batch1` and their engines need icc.
"""

from __future__ import annotations

import ctypes
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROMPT = [1, *range(1000, 1031)]
TOKENS, ROUNDS = 128, 5
EQUAL = 2e-3  # perplexities that differ by less count as equal: rounding of activations alone does that


class Peer:
    """A GGUF file in llama.cpp with one thread. exact: a float32 KV cache instead of the default 16 bits."""

    def __init__(self, file: str, exact: bool = False) -> None:
        import llama_cpp

        self.api: Any = llama_cpp
        self.api.llama_backend_init()
        self.model = self.api.llama_model_load_from_file(file.encode(), self.api.llama_model_default_params())
        options = self.api.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = 1
        if exact:
            options.type_k = options.type_v = 0
        self.context = self.api.llama_init_from_model(self.model, options)
        self.vocab = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))

    def clear(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def step(self, ids: Sequence[int], start: int, every: bool = False) -> Any:
        """Run one step: the logits [n, vocab] of all tokens, or [1, vocab] of the last token."""
        import numpy as np

        batch = self.api.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, start + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, every or i == len(ids) - 1
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        self.api.llama_batch_free(batch)
        rows = len(ids) if every else 1
        found = self.api.llama_get_logits(self.context) if every else self.api.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(found, shape=(rows, self.vocab))


def quantize(source: str, target: str, kind: str) -> None:
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.nthread, options.ftype, options.allow_requantize = 1, int(kind), True
    sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(options)))


def perplexity(windows: str, *files: str) -> None:
    import numpy as np

    with open(windows) as stream:
        texts = json.load(stream)
    for file in files:
        peer, total, scored = Peer(file, exact=True), 0.0, 0
        for ids in texts:
            peer.clear()
            logits = peer.step(ids, 0, every=True)[:-1].astype(np.float32)
            top = logits.max(1)
            sums = top + np.log(np.exp(logits - top[:, None]).sum(1))
            total += float((sums - logits[np.arange(len(ids) - 1), ids[1:]]).sum())
            scored += len(ids) - 1
        print(file, f"perplexity {math.exp(total / scored):.4f} of {scored} tokens", flush=True)


def perplexity_of_engine(windows: str, engine: str) -> None:
    """Print the perplexity of an engine as `perplexity` does for a file."""
    import icc
    import numpy as np

    with open(windows) as stream:
        texts = json.load(stream)
    total, scored = 0.0, 0
    with icc.load(engine, threads=1) as llm:
        for ids in texts:
            logits = llm.logits(ids)[:-1].astype(np.float64)
            top = logits.max(1)
            sums = top + np.log(np.exp(logits - top[:, None]).sum(1))
            total += float((sums - logits[np.arange(len(ids) - 1), ids[1:]]).sum())
            scored += len(ids) - 1
    print(engine, f"perplexity {math.exp(total / scored):.4f} of {scored} tokens", flush=True)


def rate_of_peer(file: str) -> Callable[[], float]:
    peer = Peer(file)

    def run() -> float:
        peer.clear()
        token, place = int(peer.step(PROMPT, 0).argmax()), len(PROMPT)
        begin = time.process_time()
        for i in range(TOKENS):
            token = int(peer.step([token], place + i).argmax())
        return TOKENS / (time.process_time() - begin)

    return run


def rate_of_engine(engine: str) -> Callable[[], float]:
    import icc

    llm = icc.load(engine, threads=1)

    def spent(count: int) -> float:
        begin = time.process_time()
        llm.generate([PROMPT], icc.SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True))
        return time.process_time() - begin

    return lambda: -TOKENS / (spent(1) - spent(TOKENS + 1))


def serve(rate: Callable[[], float]) -> None:
    """Warm up once, then print one measurement (tokens/s) per line of stdin."""
    rate()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(rate(), flush=True)


def rates_of(python: str, engines: str, files: str) -> dict[str, list[float]]:
    """Tokens/s of all engines and files in each round, interleaved."""
    commands = {name: [sys.executable, __file__, "engine", name] for name in engines.split(",")}
    commands |= {name: [python, __file__, "peer", name] for name in files.split(",")}
    pipe = subprocess.PIPE
    running = {
        name: subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        for name, command in commands.items()
    }
    rates: dict[str, list[float]] = {name: [] for name in running}
    for process in running.values():
        while process.stdout.readline().strip() != "ready":  # type: ignore[union-attr]
            if process.poll() is not None:
                raise RuntimeError(f"{process.args} ended")
    for _ in range(ROUNDS):
        for name, process in running.items():
            print(file=process.stdin, flush=True)
            rates[name].append(float(process.stdout.readline()))  # type: ignore[union-attr]
    for process in running.values():
        process.stdin.close()  # type: ignore[union-attr]
    return rates


def speed(python: str, engines: str, files: str) -> None:
    for name, found in rates_of(python, engines, files).items():
        print(f"{name}: {statistics.median(found):.1f} tokens/s ({min(found):.1f}-{max(found):.1f})")


def batch1(python: str, windows: str, engines: str, files: str, out: str) -> None:
    perplexities: dict[str, float] = {}
    tasks = [(sys.executable, "engine_perplexity", name) for name in engines.split(",")]
    for runs, task, name in [*tasks, *((python, "perplexity", name) for name in files.split(","))]:
        done = subprocess.run([runs, __file__, task, windows, name], capture_output=True, text=True, check=True)
        print(done.stdout.strip(), flush=True)
        perplexities[name] = float(done.stdout.split("perplexity ")[1].split()[0])
    rates = rates_of(python, engines, files)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    lines = [
        "| | MB | perplexity | tokens/s (range) | times the fastest file that predicts no better |",
        "|" + "---|" * 5,
    ]
    best = 0.0
    for name, found in rates.items():
        ratio = ""
        if name in engines.split(","):
            beaten = [f for f in files.split(",") if perplexities[f] >= perplexities[name] * (1 - EQUAL)]
            if beaten:
                against = max(beaten, key=lambda f: medians[f])
                best = max(best, medians[name] / medians[against])
                ratio = f"{medians[name] / medians[against]:.2f} ({Path(against).name})"
        size = Path(name) / "weights.safetensors" if Path(name).is_dir() else Path(name)
        rate = f"{medians[name]:.1f} ({min(found):.1f}-{max(found):.1f})"
        lines.append(
            f"| {Path(name).name} | {size.stat().st_size / 1e6:.1f} | {perplexities[name]:.3f} | {rate} | {ratio} |"
        )
    Path(out).write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(best < 1.3)


if __name__ == "__main__":
    task, *arguments = sys.argv[1:]
    {
        "quantize": quantize,
        "perplexity": perplexity,
        "speed": speed,
        "batch1": batch1,
        "engine_perplexity": perplexity_of_engine,
        "engine": lambda name: serve(rate_of_engine(name)),
        "peer": lambda name: serve(rate_of_peer(name)),
    }[task](*arguments)
