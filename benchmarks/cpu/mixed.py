"""Does a step that mixes a prefill chunk with decodes cost more than its two parts?

    python benchmarks/cpu/mixed.py ENGINE [--chunk 256] [--decodes 8] [--context 128] [--threads 2] [--rounds 9]

The chunk alone, the decodes alone and both in one step are interleaved; the ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from pathlib import Path

import numpy as np
from icc.runtime.batch.scheduled import ScheduledBatch, ScheduledSequence
from icc.runtime.batch.tables import plain_tables
from icc.runtime.executor.cpu.device import CpuDevice
from icc.runtime.executor.player import Player
from icc.runtime.format.load import open_engine
from stages import decodes


def seconds(executor: Player, batch: ScheduledBatch) -> float:
    """Wall time of one step."""
    start = time.perf_counter()
    executor.step(batch)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--decodes", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    a = parser.parse_args()
    device = CpuDevice(open_engine(a.engine, verify=False), threads=a.threads)
    executor = Player(device)
    ctypes.memset(device._kv.address, 0x2C, device.cache.nbytes)  # untouched pages would all be one page of zeros
    decoding = decodes(executor.groups, a.decodes, a.context)
    tables = plain_tables(executor.groups, a.chunk, *[a.context + 1] * a.decodes)
    ids = tuple(np.random.default_rng(0).integers(10, 100, a.chunk).tolist())
    chunk = ScheduledSequence(a.decodes, ids, 0, tables, num_logits=0)
    batches = [ScheduledBatch((chunk,)), ScheduledBatch(tuple(decoding)), ScheduledBatch((*decoding, chunk))]
    rounds = [[seconds(executor, batch) for batch in batches] for _ in range(a.rounds + 1)][1:]
    alone, decode, both = (statistics.median(column) * 1e3 for column in zip(*rounds, strict=True))
    ratios = [row[2] / (row[0] + row[1]) for row in rounds]
    print(
        f"chunk of {a.chunk}: {alone:.1f} ms, {a.decodes} decodes at {a.context}: {decode:.1f} ms, in one step: "
        f"{both:.1f} ms, {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) of the sum"
    )
    executor.close()


if __name__ == "__main__":
    main()
