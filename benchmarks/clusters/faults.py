"""What is lost when parts of a Ray cluster are killed under load, and when the engine is upgraded.

    icc compile samples/pystd -o build/pystd.engine --target native --quant rtn4 --max-seq-len 1024 --max-batch-size 16
    python benchmarks/clusters/faults.py build/pystd.engine --nodes 3 --streams 6

A head node without CPUs and NODES nodes with one CPU each, all on this machine (`ray.cluster_utils.Cluster`), with
`icc serve --ray` as users run it, a replica on each node. STREAMS clients ask without pause, streamed. After some
seconds one part is killed with SIGKILL (or the engine is upgraded). The script then counts how the requests ended that
were under way or arrived before all replicas ran again: with [DONE], with an error that the client sees (a status, an
error event, a broken connection), or without either, which must not happen. It prints a line per scenario and one JSON
value; the exit code is 1 if a request was lost silently or a part did not come back.
"""

# ruff: noqa: E402  (Ray reads its settings when it is imported)

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from icc.runtime.ray.library import end_haproxy, prepare_own

FOLDER = Path(tempfile.mkdtemp(prefix="icc-faults-"))
prepare_own(FOLDER)  # before Ray is imported, for all processes of the cluster
import psutil
import ray
from icc.runtime.loadtest.endpoint import Endpoint, Trace
from ray.cluster_utils import Cluster
from servers import Server, started

APP = "icc"
SCENARIOS = ("replica", "engine", "node", "router", "controller", "upgrade")


class Load:
    """Clients that send requests without pause until `stop`."""

    def __init__(self, server: Server, streams: int, tokens: int) -> None:
        self._endpoint = Endpoint(server.url, server.model, extra={"ignore_eos": True, "temperature": 0})
        self._tokens, self._streams = tokens, streams
        self.traces: list[Trace] = []
        self._stopped = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._streams)]

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)

    async def _client(self, number: int) -> None:
        turn = 0
        while not self._stopped:
            prompt = [3 + number, 3 + turn % 100, *range(3, 40)]
            trace = await self._endpoint.ask(prompt, self._tokens, asyncio.get_running_loop().time())
            self.traces.append(trace)
            turn += 1
            if not trace.ok:
                await asyncio.sleep(0.1)  # as clients that try again do


def ended(traces: list[Trace]) -> dict[str, int]:
    """The number of requests by how they ended."""
    found = {"done": 0, "refused": 0, "failed": 0, "silent": 0}
    for trace in traces:
        if trace.error:
            found["refused" if trace.status >= 400 else "failed"] += 1
        else:
            found["done" if trace.ended and trace.status == 200 else "silent"] += 1
    return found


def processes(title: str) -> list[psutil.Process]:
    """Ray's processes on this machine whose titles begin with `title`."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        if words[0].startswith(f"ray::{title}"):
            found.append(process)
    return found


def running(name: str = "engine") -> int:
    """How many replicas of a deployment run."""
    from ray import serve

    found = serve.status().applications.get(APP)
    return 0 if found is None else found.deployments[name].replica_states.get("RUNNING", 0)


async def until(check: Callable[[], bool], seconds: float) -> float | None:
    """Wait until `check` is true; the seconds that it took, or None if it took longer than `seconds`."""
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        if await asyncio.to_thread(check):
            return time.monotonic() - begin
        await asyncio.sleep(0.1)
    return None


def kill(process: psutil.Process) -> None:
    """Send SIGKILL to one process."""
    print(f"  SIGKILL {process.pid} {' '.join(process.cmdline())[:60]}", file=sys.stderr)
    process.send_signal(signal.SIGKILL)


class Ground:
    """A cluster with a server, and the faults that are injected into it."""

    def __init__(self, given: argparse.Namespace, cluster: Cluster, nodes: list, server: Server) -> None:
        self.given, self.cluster, self.nodes, self.server = given, cluster, nodes, server

    async def act(self, scenario: str) -> None:
        """Inject the fault of a scenario, or upgrade the engine."""
        if scenario == "replica":
            kill(processes("ServeReplica:icc:engine")[0])
        elif scenario == "engine":
            children = processes("ServeReplica:icc:engine")[0].children(recursive=True)
            kill(next(child for child in children if any("worker_main" in word for word in child.cmdline())))
        elif scenario == "router":
            kill(processes("ServeReplica:icc:router")[0])
        elif scenario == "controller":
            kill(processes("ServeController")[0])
        elif scenario == "node":
            gone = self.nodes.pop()
            self.cluster.remove_node(gone, allow_graceful=False)
            self.nodes.append(self.cluster.add_node(num_cpus=1))
        else:
            other = FOLDER / f"next-{time.monotonic_ns()}.engine"
            shutil.copytree(self.given.engine, other)
            link = FOLDER / "served.engine"
            (FOLDER / "link").symlink_to(other)
            os.replace(FOLDER / "link", link)
            self.server.process.send_signal(signal.SIGHUP)

    async def run(self, scenario: str) -> dict:
        """Run one scenario under load; how the requests ended that it may have affected."""
        before = {process.pid for process in processes("ServeReplica:icc:engine")}
        routers, asked = running("router"), {process.pid for process in processes("ServeReplica:icc:router")}
        load = Load(self.server, self.given.streams, self.given.tokens)
        load.start()
        await asyncio.sleep(self.given.seconds)
        at = time.monotonic()
        await self.act(scenario)

        def back() -> bool:
            now = {process.pid for process in processes("ServeReplica:icc:engine")}
            if scenario == "upgrade":
                return not now & before and running() == self.given.nodes
            if scenario in ("replica", "node"):
                return now != before and len(now) == self.given.nodes and running() == self.given.nodes
            changed = scenario != "router" or {process.pid for process in processes("ServeReplica:icc:router")} != asked
            return changed and running() == self.given.nodes and running("router") == routers

        await asyncio.sleep(1.0)
        took = await until(back, self.given.patience)
        await asyncio.sleep(2.0)  # do all replicas serve again?
        await load.stop()
        touched = [trace for trace in load.traces if trace.end >= at]
        late = [trace for trace in load.traces if trace.sent > time.monotonic() - 1.5]
        found = {"scenario": scenario, "back_s": None if took is None else round(took + 1, 1), **ended(touched)}
        found["errors"] = sorted({trace.error.strip()[:120] for trace in touched if trace.error})[:5]
        found["well_after"] = all(trace.ok for trace in late)
        print(json.dumps(found), flush=True)
        return found


@contextmanager
def ground(given: argparse.Namespace) -> Iterator[Ground]:
    """The cluster and the server, which run until the end of the block."""
    (FOLDER / "served.engine").symlink_to(Path(given.engine).absolute())
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(given.nodes)]
        ray.init(address=cluster.address, namespace="serve", logging_level="warning", log_to_driver=False)
        options = ["--ray", "--ray-address", cluster.address, "--ray-proxies", "head", "--ray-cpus", "1"]
        options += ["--replicas", str(given.nodes), "--threads", "1", "--drain", "60"]
        with started(FOLDER / "served.engine", options) as server:
            server.model = "served"
            yield Ground(given, cluster, nodes, server)
    finally:
        ray.shutdown()
        cluster.shutdown()
        end_haproxy(FOLDER)
        shutil.rmtree(FOLDER, ignore_errors=True)


def main() -> int:
    """Read the command line, run the scenarios, print the results; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3, help="seconds of load before the fault")
    parser.add_argument("--patience", type=float, default=120, help="seconds to wait for a recovery")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    given = parser.parse_args()
    with ground(given) as place:
        found = [asyncio.run(place.run(name)) for name in given.scenarios.split(",") if name]
    print(json.dumps({"when": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[0], "found": found}))
    dropped = [one for one in found if one["scenario"] == "upgrade" and one["failed"] + one["refused"]]
    return int(any(one["silent"] or one["back_s"] is None for one in found) or bool(dropped))


if __name__ == "__main__":
    sys.exit(main())
