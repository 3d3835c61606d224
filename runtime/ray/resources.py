"""The resources that Ray reserves for a replica of an engine: CPUs, and GPUs for its ranks, all on one machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UsageError
from ..executor.cpu.cores import usable_cores
from ..format.manifest import Manifest
from ..options import LoadOptions
from .options import RayOptions


@dataclass(frozen=True)
class ReplicaPlace:
    """load: the options of a replica's engine. actor: the resources that Ray reserves for it, as `ray_actor_options`.
    bundles: of its placement group; None if the actor needs none."""

    load: LoadOptions
    actor: dict[str, Any]
    bundles: list[dict[str, float]] | None

    def fits(self, resources: Mapping[str, float]) -> int:
        """How many replicas fit into these resources, given by Ray's names."""
        wanted = {
            "CPU": self.actor["num_cpus"],
            "GPU": self.actor.get("num_gpus", 0),
            **self.actor.get("resources", {}),
        }
        return min(
            (int(resources.get(name, 0) / number + 1e-6) for name, number in wanted.items() if number), default=0
        )


def replica_place(load: LoadOptions, manifest: Manifest, options: RayOptions) -> ReplicaPlace:
    """The resources that a replica needs, and how its engine is loaded.

    A CPU engine's kernels get as many threads as CPUs are reserved for it; each rank has at least one core. A GPU
    engine has a GPU for each rank; Ray chooses it and shows its processes no other. The ranks of a replica communicate
    through shared memory: a placement group of one bundle keeps them on one machine. UsageError for options that
    contradict that.
    """
    ranks = manifest.ranks
    if not manifest.main.libraries:
        if load.device is not None:
            raise UsageError("--device chooses a GPU, and with --ray, Ray does that", "leave it out")
        kept: dict[str, float] = {"CPU": options.cpus or float(ranks), "GPU": float(ranks)}
    else:
        if load.cores is not None:
            raise UsageError("--cores is for a single machine, and Ray places replicas on several", "give --ray-cpus N")
        cpus = options.cpus or float(load.threads or usable_cores(None))
        if cpus < ranks > 1:
            raise UsageError(f"--ray-cpus {cpus:g} is fewer than the {ranks} ranks of the engine")
        kept = {"CPU": cpus}
        load = replace(load, threads=load.threads or max(int(cpus), 1))
    kept |= options.named_resources
    return ReplicaPlace(load, _actor_options(kept), [kept] if ranks > 1 else None)


def _actor_options(kept: dict[str, float]) -> dict[str, Any]:
    others = {name: number for name, number in kept.items() if name not in ("CPU", "GPU")}
    found: dict[str, Any] = {"num_cpus": kept["CPU"]}
    if "GPU" in kept:
        found["num_gpus"] = kept["GPU"]
    return found | ({"resources": others} if others else {})
