"""icc's adapters beside llama.cpp's: the same GGUF base and adapter, interleaved; every decoded sequence uses it.

    python benchmarks/adapters_llamacpp.py --shape llama-1b --work build --peers build/peers
    python benchmarks/adapters_llamacpp.py --shape tiny --type F32 --work build --peers build/peers    # compares logits

The script makes all of its inputs: a checkpoint of random weights, its GGUF file, an engine of that file with adapter
slots, and a random adapter of all linear layers as convert_lora_to_gguf.py writes it. `--peers` is a virtual
environment with the packages of cpu/peers.txt; without it icc runs alone. Times are medians over a run's steps, then
over the rounds; a ratio is the median of the rounds' ratios. Logits are compared first: with a float32 base they are
equal up to rounding; with other bases they differ, because the two engines round a layer's input differently. With
BENCH_CLOCK=cpu and --threads 1, times are CPU times, which other load on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import icc
import numpy as np
from adapter_cost import step_ms, write_adapter
from gguf import GGMLQuantizationType
from icc.runtime.llm import LLM
from make_gguf import write as write_gguf
from make_model import SHAPES
from make_model import write as write_model

HERE = Path(__file__).resolve().parent
PROMPT = [5, 7, 9, 11, 40, 3, 101, 17]
NAME = "a"


class Peer:
    """llama.cpp with the base and the adapter, in a process with its own environment; see llamacpp_adapter.py."""

    def __init__(self, python: Path, base: Path, adapter: Path, threads: int, batch: int) -> None:
        command = [python, HERE / "llamacpp_adapter.py", base, adapter, threads, batch]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, **request: Any) -> list[float]:
        """Send a request (see llamacpp_adapter.py); the answer is the milliseconds of steps, or logits. Raises
        RuntimeError if the process ended."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("llama.cpp's process ended")
        return json.loads(line)

    def step_ms(self, batch: int, adapted: bool, tokens: int) -> float:
        """As `adapter_cost.step_ms`."""
        return statistics.median(self.ask(batch=batch, adapted=adapted, steps=tokens))


def make_files(shape: str, kind: str, work: Path, slots: int) -> tuple[Path, Path, Path]:
    """The checkpoint, the GGUF base, and its engine with `slots` adapter slots; existing files are kept."""
    model, base = work / shape, work / f"{shape}.{kind}.gguf"
    engine = work / f"{shape}.{kind}.adapters.engine"
    if not model.exists():
        write_model(shape, model)
    if not base.exists():
        write_gguf(str(model), base, kind=GGMLQuantizationType[kind])
    if not engine.exists():
        icc.compile(
            base, engine, target="native", adapters=f"{slots}x16", max_batch_size=slots, max_seq_len=1024,
            kv_cache="f32" if kind == "F32" else "auto",
        )  # fmt: skip
    return model, base, engine


def make_adapter(llm: LLM, model: Path, work: Path, rank: int) -> Path:
    """Write a random adapter as peft and as GGUF; the path of the GGUF file."""
    sys.path.insert(0, str(HERE.parent / "tests/adapters"))
    from gguf_adapters import convert  # type: ignore[reportMissingImports]

    folder = work / "adapter"
    write_adapter(llm, folder, rank, 1)
    return convert(folder, model, folder / "adapter.gguf", "llama")


def compare_logits(llm: LLM, peer: Peer) -> None:
    """Print the difference from llama.cpp's logits, with and without the adapter, and the adapter's effect."""
    found: dict[bool, tuple[np.ndarray, np.ndarray]] = {}
    for adapted in (False, True):
        ours = llm.logits(PROMPT, adapter=NAME if adapted else None)[-1]
        found[adapted] = ours, np.array(peer.ask(prompt=PROMPT, adapted=adapted))
    for adapted, (ours, theirs) in found.items():
        far = np.abs(ours - theirs).max() / np.abs(theirs).max()
        print(f"logits {'with' if adapted else 'without'} the adapter: {far:.1e} of the largest away from llama.cpp's")
    (before, _), (after, _) = found[False], found[True]
    print(f"the adapter changes logits by {np.abs(after - before).max() / np.abs(before).max():.2f} of the largest")


def measure(llm: LLM, peer: Peer | None, batches: list[int], tokens: int, rounds: int) -> dict[str, list[float]]:
    """Median milliseconds of a step by row, one for each round; rows are interleaved."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for batch in batches:
            for adapted in (False, True):
                row = f"batch {batch}, {'adapter' if adapted else 'base'}"
                names = [NAME if adapted else None] * batch
                found.setdefault(f"{row}, icc", []).append(step_ms(llm, names, tokens))
                if peer is not None:
                    found.setdefault(f"{row}, llama.cpp", []).append(peer.step_ms(batch, adapted, tokens))
    return found


def show(found: dict[str, list[float]]) -> None:
    """Print a line per row: the medians, and the ratio if llama.cpp ran."""
    for name, ours in found.items():
        row, _, who = name.rpartition(", ")
        if who != "icc":
            continue
        line = f"{row:20} icc {statistics.median(ours):8.2f} ms [{min(ours):.2f}, {max(ours):.2f}]"
        if theirs := found.get(f"{row}, llama.cpp"):
            ratios = [one / other for one, other in zip(theirs, ours, strict=True)]
            line += f"  llama.cpp {statistics.median(theirs):8.2f} ms [{min(theirs):.2f}, {max(theirs):.2f}]"
            line += f"  ratio {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        print(line)


def main() -> None:
    """Make missing files, compare logits, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-1b")
    parser.add_argument("--type", choices=["Q4_0", "Q8_0", "F32"], default="Q4_0", help="GGUF type of the base")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--engine", type=Path, help="an engine with adapter slots: runs icc alone, needs --model")
    parser.add_argument("--model", type=Path, help="the checkpoint that --engine was compiled from")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    batches = [int(batch) for batch in given.batch.split(",")]
    model, base, engine = given.model, None, given.engine
    if engine is None:
        model, base, engine = make_files(given.shape, given.type, given.work, max(batches))
    with tempfile.TemporaryDirectory() as own, icc.load(engine, threads=given.threads) as llm:
        adapter = make_adapter(llm, model, Path(own), given.rank)
        llm.load_adapter(NAME, adapter)
        peer = None
        if given.peers is not None and base is not None:
            peer = Peer(given.peers / "bin/python", base, adapter, given.threads, max(batches))
            compare_logits(llm, peer)
        show(measure(llm, peer, batches, given.tokens, given.rounds))
        print(f"load average {os.getloadavg()[0]:.1f} at the end, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
