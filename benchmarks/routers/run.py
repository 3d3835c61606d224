"""Third-party routers and indexers, unmodified from PyPI, in front of `icc serve`.

    icc compile samples/pystd -o build/pystd.engine --target native --quant rtn4 --max-batch-size 8
    python benchmarks/routers/run.py build/pystd.engine [dynamo,vllm-router,smg]

Writes benchmarks/results/routers.md: the rows of the named routers, or all. Environments are made in build/routers, as
benchmarks/clients makes them. Dynamo's indexer must know how many tokens of a prompt are cached, through eviction and
restarts; cache-aware routers must find more prompt tokens in caches than round robin, and lose no request while an
engine is killed. The exit code is 1 if any of this fails.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

import indexer
import proxies

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "routers.md"
HEAD = "| router | what | found | right |\n|---|---|---|---|"


def main() -> int:
    """Test the routers that are named and write the rows; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("routers", nargs="?", default="dynamo,vllm-router,smg")
    given = parser.parse_args()
    rows: list[tuple[str, str, str, bool]] = []
    for name in given.routers.split(","):
        found = indexer.judge(given.engine) if name == "dynamo" else proxies.judge(name, given.engine)
        for row in found:
            print(" | ".join(map(str, row)), flush=True)
            rows.append(row)
    lines = [f"| {router} | {what} | {figures} | {'yes' if right else 'NO'} |" for router, what, figures, right in rows]
    before, _, table = RESULTS.read_text().partition(HEAD)
    again = {router.split()[0] for router, *_ in rows}
    kept = [line for line in table.splitlines() if line.startswith("|") and line.split()[1] not in again]
    stamp = f"Last run {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."
    RESULTS.write_text(before + HEAD + "\n".join(["", *kept, *lines, "", stamp, ""]))
    return int(not all(right for *_, right in rows))


if __name__ == "__main__":
    sys.exit(main())
