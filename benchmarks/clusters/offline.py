"""Are files and datasets of prompts answered in full if engines are killed, and do they continue where they stopped?

    icc compile samples/pystd -o build/pystd.engine --target native --quant rtn4 --max-seq-len 1024 --max-batch-size 16
    python benchmarks/clusters/offline.py build/pystd.engine --prompts 400

A head node without CPUs and two nodes with one CPU each, all on this machine. `icc batch --ray` answers PROMPTS lines;
meanwhile an engine's actor is killed with SIGKILL, then the command itself, which is started again. As many prompts
also go through `icc.ray.map_batches` with `keep` (needs ray[data]), of which an actor is killed, and then once more.
Prints one JSON value; the exit code is 1 if an answer is missing or was computed twice without need.
"""

# ruff: noqa: E402  (Ray reads its settings when it is imported)

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from icc.runtime.ray.library import prepare

prepare()
import icc
import psutil
import ray
from icc.runtime.ray.stored import StoredAnswers
from ray.cluster_utils import Cluster


def actors(title: str) -> list[psutil.Process]:
    """Ray's actors on this machine whose titles contain `title`."""
    found = psutil.process_iter(["cmdline"])
    return [one for one in found if title in (one.info["cmdline"] or [""])[0] and "ray::" in one.info["cmdline"][0]]


def kill_one(title: str) -> int:
    """Send SIGKILL to an actor; its process id."""
    process = actors(title)[0]
    process.send_signal(signal.SIGKILL)
    return process.pid


def count(file: Path) -> int:
    """The number of lines of a file; 0 if it does not exist yet."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait(check: Callable[[], bool], seconds: float = 200) -> None:
    """Wait until `check` is true; AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


def batch(engine: str, address: str, prompts: int, folder: Path) -> dict[str, Any]:
    """Run `icc batch --ray`, kill an actor and then the command, and run it again; counts of the answers."""
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    bodies = [{"prompt": [3 + n % 90, 4 + n // 90, 5, 6], "max_tokens": 48, "ignore_eos": True} for n in range(prompts)]
    rows = [{"custom_id": f"r{n}", "url": "/v1/completions", "body": body} for n, body in enumerate(bodies)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "icc.compiler.cli", "batch", engine, str(source), str(target), "--threads", "1"]
    command += ["--ray", "--ray-address", address, "--ray-cpus", "1"]
    with (folder / "log").open("w") as log:
        first = subprocess.Popen(command, stdout=log, stderr=log)
        wait(lambda: count(target) > prompts // 8)
        kill_one("LineActor")
        at_kill = count(target)
        wait(lambda: count(target) > prompts // 2 or first.poll() is not None)
        first.send_signal(signal.SIGKILL)
        first.wait()
        before = count(target)
        wait(lambda: not actors("LineActor"))
        done = subprocess.run(command, stdout=log, stderr=log)
    results = [json.loads(line) for line in target.read_text().splitlines()]
    names = [one["custom_id"] for one in results]
    statuses = [one["response"]["status_code"] for one in results]
    return {
        "lines": prompts, "killed_actor_at": at_kill, "killed_command_at": before, "code": done.returncode,
        "answered": len(set(names)), "twice": len(names) - len(set(names)),
        "failed": sum(status != 200 for status in statuses),
    }  # fmt: skip


def dataset(engine: str, prompts: int, folder: Path) -> dict[str, Any]:
    """Run `icc.ray.map_batches`, kill an actor of it, and run it once more; counts of the answers."""
    rows = [{"n": n, "prompt": f"def function_{n}(values):"} for n in range(prompts)]
    given = {"params": icc.SamplingParams(max_tokens=32, temperature=0.0), "keep": folder / "kept", "engines": 2}

    def killer() -> None:
        wait(lambda: len(list((folder / "kept").glob("*.jsonl"))) > 2)
        kill_one("MapWorker")

    thread = threading.Thread(target=killer, daemon=True)
    thread.start()
    data = ray.data.from_items(rows).repartition(8)
    found = icc.ray.map_batches(data, engine, cpus=1, batch_size=16, **given).take_all()
    thread.join(1)
    stored = StoredAnswers(folder / "kept")
    files = len(list((folder / "kept").glob("*.jsonl")))
    again = icc.ray.map_batches(data, engine, cpus=1, batch_size=16, **given).take_all()
    return {
        "rows": len(found), "killed": not thread.is_alive(), "kept": len(stored._found), "files": files,
        "errors": sum(bool(row["answer_error"]) for row in found),
        "files_after_again": len(list((folder / "kept").glob("*.jsonl"))),
        "equal": {row["n"]: row["answer"] for row in found} == {row["n"]: row["answer"] for row in again},
    }  # fmt: skip


def main() -> int:
    """Read the command line, run both, print the results; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--prompts", type=int, default=400)
    given = parser.parse_args()
    engine = str(Path(given.engine).absolute())
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    with tempfile.TemporaryDirectory(prefix="icc-offline-") as name:
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=1)
            files = batch(engine, cluster.address, given.prompts, Path(name))
            print(json.dumps(files), flush=True)
            ray.init(address=cluster.address, logging_level="warning", log_to_driver=False)
            rows = dataset(engine, given.prompts, Path(name))
        finally:
            ray.shutdown()
            cluster.shutdown()
    print(json.dumps({"when": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[0], "file": files, "dataset": rows}))
    whole = files["answered"] == rows["rows"] == rows["kept"] == given.prompts
    return int(not (whole and rows["equal"] and rows["files"] == rows["files_after_again"] and not files["failed"]))


if __name__ == "__main__":
    sys.exit(main())
