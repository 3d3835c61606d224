"""PrefixRouter: Ray Serve's request router by a ReplicaChooser."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica  # pyright: ignore[reportMissingImports]

from .asked import AskedOfReplica
from .choosing import ReplicaChooser


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that computes it the soonest. What is in the request comes as an AskedOfReplica
    among the arguments; a request without one goes to the least load."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Ray has made the router. models: what requests call the model itself; other names are adapters'."""
        self._chooser: ReplicaChooser[ReplicaID] = ReplicaChooser(kwargs.get("models", ()))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates, the best first, each alone in its rank."""
        if not candidate_replicas:
            return []
        by_name = {one.replica_id: one for one in candidate_replicas}
        said = {name: one.routing_stats or {} for name, one in by_name.items()}
        return [[by_name[name]] for name in self._chooser.ranked(_asked(pending_request), said)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray says which replicas there are now."""
        self._chooser.keep({one.replica_id for one in replicas})
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A replica has ended, and its cache with it."""
        self._chooser.forget(replica_id)
        super().on_replica_actor_died(replica_id)


def _asked(request: PendingRequest | None) -> AskedOfReplica:
    found = () if request is None else request.args
    return next((one for one in found if isinstance(one, AskedOfReplica)), AskedOfReplica())
