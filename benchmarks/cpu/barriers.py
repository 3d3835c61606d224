"""How long barriers of the kernels' threads take: measured on this machine's cores, modelled for more cores.

    python benchmarks/cpu/barriers.py [ENGINE] [--bytes 0.75e9] [--rounds 20000]

The model: a cache line that several threads write moves from one core to the next in a time `t`. A barrier of two
threads takes 3 t (two arrivals and the release). With n threads on one counter, arrivals take n t and the release 2 t;
in groups of eight (codegen_templates/cpp/team.h), arrivals take 8 t and one t per group. The number of barriers per
step comes from ENGINE. The share of a step assumes one sequence that reads `--bytes` at 4 GB/s per thread, at most
400 GB/s.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

from icc.runtime.format.load import open_engine

HERE = Path(__file__).resolve().parent
GROUP, SIZES = 8, (2, 8, 16, 32, 64, 128)
PER_THREAD, AT_MOST = 4e9, 400e9  # bytes/s


def barrier_seconds(threads: int, rounds: int, folder: str) -> float:
    """Seconds of one barrier, the best of five runs; each thread has its own core if there are enough cores."""
    library = Path(folder) / "barriers.so"
    if not library.exists():
        include = f"-I{HERE.parents[1] / 'codegen_templates' / 'cpp'}"
        command = ["g++", "-O3", "-std=c++17", "-march=native", "-shared", "-fPIC", "-pthread", include]
        subprocess.run([*command, str(HERE / "barriers.cpp"), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).barrier_seconds
    function.restype = ctypes.c_double
    own = sorted(os.sched_getaffinity(0))
    cores = (ctypes.c_int * threads)(*(own[:threads] if len(own) >= threads else [-1] * threads))
    return min(function(threads, cores, rounds) for _ in range(5))


def modelled(threads: int, handed: float) -> tuple[float, float]:
    """Seconds of a barrier on one counter, and of one by groups. handed: seconds to move a line to another core."""
    groups = -(-threads // GROUP)
    grouped = min(threads, GROUP) + (groups if groups > 1 else 0)
    return (threads + 2) * handed, (grouped + 2) * handed


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", nargs="?", type=Path)
    parser.add_argument("--bytes", type=float, default=0.75e9)
    parser.add_argument("--rounds", type=int, default=20000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        count = len(os.sched_getaffinity(0))
        measured = {n: barrier_seconds(n, given.rounds, folder) for n in sorted({min(2, count), count, 2 * count})}
    for threads, seconds in measured.items():
        print(f"measured: {threads} threads on {count} cores, {seconds * 1e9:,.0f} ns")
    handed = measured[min(2, count)] / 3
    barriers = len(open_engine(given.engine).program.steps) if given.engine else 200
    print(f"modelled: a cache line moves in {handed * 1e9:.0f} ns, a step has {barriers} barriers\n")
    print("| threads | one counter | by groups of 8 | a step's barriers | of a step |\n|---|---|---|---|---|")
    for threads in SIZES:
        flat, grouped = modelled(threads, handed)
        work = given.bytes / min(threads * PER_THREAD, AT_MOST)
        shares = [barriers * one / (barriers * one + work) for one in (flat, grouped)]
        print(
            f"| {threads} | {flat * 1e6:.2f} us | {grouped * 1e6:.2f} us | {barriers * flat * 1e6:,.0f}, "
            f"{barriers * grouped * 1e6:,.0f} us | {shares[0]:.1%}, {shares[1]:.1%} |"
        )


if __name__ == "__main__":
    main()
