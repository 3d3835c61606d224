"""Peak memory of a compile without mapped files: the highest RssAnon of `icc compile`, sampled every 20 ms.

python benchmarks/compile_memory.py build/llama-1b -- --target native --quant rtn4
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def anonymous_bytes(pid: int) -> int:
    """Bytes of a process's resident memory that are no mapped file; 0 if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon")), 0)


def main() -> None:
    """Compile and print the peak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, help="keep the engine here")
    a, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory(dir=a.model.resolve().parent) as folder:
        out = a.out or Path(folder) / "e.engine"
        command = [sys.executable, "-m", "icc.compiler.cli", "compile", str(a.model), "-o", str(out), "--force"]
        start = time.perf_counter()
        process = subprocess.Popen([*command, *(o for o in rest if o != "--")])
        peak = 0
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(0.02)
    seconds = time.perf_counter() - start
    print(f"exit {process.returncode}, {seconds:.1f} s, peak anonymous memory {peak / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
