"""PrefixRouter: a request router of Ray Serve that uses a ReplicaChooser."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica  # pyright: ignore[reportMissingImports]

from .asked import AskedOfReplica
from .choosing import ReplicaChooser


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that will compute it soonest. The request is described by an AskedOfReplica among
    its arguments; one without it goes to the replica with the least load."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Ray after it made the router. models: names of the model itself; any other model name is an
        adapter."""
        self._chooser: ReplicaChooser[ReplicaID] = ReplicaChooser(kwargs.get("models", ()))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates, the best first, each in a group of its own."""
        if not candidate_replicas:
            return []
        by_name = {one.replica_id: one for one in candidate_replicas}
        said = {name: one.routing_stats or {} for name, one in by_name.items()}
        return [[by_name[name]] for name in self._chooser.ranked(_asked(pending_request), said)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray with all replicas that now exist."""
        self._chooser.keep({one.replica_id for one in replicas})
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Ray when a replica has ended: forget it and its cache."""
        self._chooser.forget(replica_id)
        super().on_replica_actor_died(replica_id)


def _asked(request: PendingRequest | None) -> AskedOfReplica:
    found = () if request is None else request.args
    return next((one for one in found if isinstance(one, AskedOfReplica)), AskedOfReplica())
