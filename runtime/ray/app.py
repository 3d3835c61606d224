"""`icc.ray.deployment`: a Ray Serve application of an engine, with the server of `icc serve` in each replica."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..format.load import read_manifest
from ..format.manifest import Manifest
from ..format.present import engine_name
from ..options import LoadOptions
from ..server.options import ServeOptions, adapter_paths
from .choosing import STATS_S
from .cluster import has_room
from .library import import_ray
from .options import RayOptions
from .resources import ReplicaPlace, replica_place

if TYPE_CHECKING:
    from ray.serve import Application  # pyright: ignore

HEALTH_S = 2.0  # between two health checks of a replica
ENGINE = "engine"  # the name of the replicas' deployment
# options that only a single server can have, and their refusals
_ALONE = {
    "batch_store": "--batch-store is for a single server: use icc batch --ray",
    "devices": "--devices is for a single machine: with --ray, Ray chooses GPUs",
    "grpc_port": "--grpc-port is for a single server: with --ray, Ray routes",
    "kv_events": "--kv-events is for a single server: with --ray, Ray routes",
    "kv_events_replay": "--kv-events-replay is for a single server: with --ray, Ray routes",
    "nixl": "--nixl is for a single server: with --ray, Ray routes",
    "prefill_replicas": "--prefill-replicas is for replicas on a single machine",
    "prefiller": "--prefiller is for a single server: with --ray, Ray routes",
    "role": "--role is for a single server: with --ray, Ray routes",
    "ssl_certfile": "--ssl-certfile: with --ray, the load balancer in front of the cluster terminates HTTPS",
    "ssl_keyfile": "--ssl-keyfile: with --ray, the load balancer in front of the cluster terminates HTTPS",
}


def deployment(
    engine: str | PathLike[str] | ServeOptions,
    *,
    replicas: int | None = None,
    autoscale: tuple[int, int] | None = None,
    cpus: float | None = None,
    options: RayOptions | None = None,
    **serve: Any,
) -> Application:
    """A Ray Serve application that serves an engine: `ray.serve.run(icc.ray.deployment("model.engine", replicas=4))`.

    Args:
        engine: the engine's directory, at the same path on every machine; or the options of `icc serve`.
        replicas: how many, each with an engine process. By default 1, or those of the options.
        autoscale: the least and the most replicas, instead of `replicas`: as many as the queue and the KV caches need.
        cpus: CPUs that Ray reserves for a replica. options: all of RayOptions, instead of single ones.
        serve: other fields of ServeOptions, such as `api_key_file` and `drain_s`.

    A request goes to the replica that will compute it soonest, by prefix, adapter, queue and KV use. A running
    application of the same name is upgraded, replica by replica: if the cluster has capacity, a new replica starts
    before an old one ends, and running requests have up to `drain_s` seconds to finish.

    Raises:
        MissingExtraError: Ray Serve is not installed.
        UsageError: options that contradict each other, or that only a single server can have.
        EngineFormatError: the engine cannot be read.
    """
    given = engine if isinstance(engine, ServeOptions) else ServeOptions(LoadOptions(engine), **serve)
    given = given if replicas is None else replace(given, replicas=replicas)
    ray = options or RayOptions()
    ray = replace(ray, scale=autoscale or ray.scale, cpus=ray.cpus if cpus is None else cpus)
    manifest, place = planned(given, ray)
    import_ray()
    return _application(given, ray, manifest, place)


def planned(serve: ServeOptions, ray: RayOptions) -> tuple[Manifest, ReplicaPlace]:
    """The engine's manifest, and the resources that a replica needs. UsageError for options that several servers cannot
    have, or a wrong number of replicas; EngineFormatError if the engine cannot be read."""
    for name, words in _ALONE.items():
        if getattr(serve, name) != getattr(ServeOptions, name):  # not the default; port 0 is a value too
            raise UsageError(words)
    if not 1 <= serve.replicas <= 1024:
        raise UsageError(f"--replicas {serve.replicas} is not from 1 to 1024")
    if ray.scale is not None and serve.replicas != 1:
        raise UsageError("--replicas and --ray-autoscale contradict each other", "give one of them")
    manifest = read_manifest(Path(serve.load.path))
    return manifest, replica_place(serve.load, manifest, ray)


def _application(serve: ServeOptions, ray: RayOptions, manifest: Manifest, place: ReplicaPlace) -> Application:
    from ray.serve import deployment as of_class  # pyright: ignore
    from ray.serve import ingress  # pyright: ignore
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy  # pyright: ignore[reportMissingImports]

    from .replica import EngineReplica

    most = serve.replicas if ray.scale is None else ray.scale[1]
    each = _absolute(replace(serve, load=place.load, replicas=1, name=_names(serve)))
    scaling: dict[str, Any] = {"num_replicas": serve.replicas}
    if ray.scale is not None:
        policy = AutoscalingPolicy(policy_function=f"{__package__}.scaling:policy")
        least = ray.scale[0]
        scaling = {"autoscaling_config": AutoscalingConfig(min_replicas=least, max_replicas=most, policy=policy)}
    room = manifest.limits.max_batch_size + serve.max_queue
    found = of_class(
        ingress()(EngineReplica),
        name=ENGINE,
        ray_actor_options=place.actor,
        **({} if place.bundles is None else _together(place.bundles)),
        max_ongoing_requests=room
        + 64,  # so that the server's own queue refuses first, with OpenAI's error, and /metrics still answers
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=max(serve.watchdog_s, HEALTH_S),
        graceful_shutdown_timeout_s=serve.drain_s,
        graceful_shutdown_wait_loop_s=0.2,
        # in an upgrade a new replica starts before an old one ends; without capacity Ray would wait forever
        max_surge_percent=max(ceil(100 / most), 20) if has_room(place) else 0,
        **_routing(serve, manifest, most),
        **scaling,
    ).bind(each, manifest.digest)
    return found if most == 1 else _routed(found)


def _together(bundles: list[dict[str, float]]) -> dict[str, Any]:
    return {"placement_group_bundles": bundles, "placement_group_strategy": "STRICT_PACK"}


def _absolute(serve: ServeOptions) -> ServeOptions:
    """The options with absolute paths, which hold in any working directory. A link to an engine is resolved now:
    running replicas keep their engine when the link is changed."""
    load = replace(serve.load, path=str(Path(serve.load.path).resolve()))
    found = {name: value.absolute() for name, value in vars(serve).items() if isinstance(value, Path)}
    if serve.chat_template is not None and not serve.chat_template.exists():
        del found["chat_template"]  # not a path: the name of a template of the model
    lora = tuple(f"{name}={path.absolute()}" for name, path in adapter_paths(serve.lora).items())
    return replace(serve, load=load, lora=lora, **found)


def _names(serve: ServeOptions) -> str:
    """The name by which requests call the model; for a link to an engine, the link's name, which stays when the link is
    changed."""
    return serve.name or engine_name(Path(serve.load.path).absolute())


def _routing(serve: ServeOptions, manifest: Manifest, most: int) -> dict[str, Any]:
    if most == 1:
        return {}
    from ray.serve.config import RequestRouterConfig  # pyright: ignore[reportMissingImports]

    return {
        "request_router_config": RequestRouterConfig(
            request_router_class=f"{__package__}.request_router:PrefixRouter",
            request_router_kwargs={"models": ["", *_names(serve).split(",")]},
            request_routing_stats_period_s=STATS_S,
        )
    }


def _routed(engine: Application) -> Application:
    """The application, with a deployment that HAProxy asks which replica gets a request."""
    from ray.serve import deployment as of_class  # pyright: ignore
    from ray.serve import ingress  # pyright: ignore

    from .front import Front

    front = of_class(
        ingress()(Front),
        name="router",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=4096,
        max_surge_percent=100,
    )
    return engine._with_ingress_request_router(front.bind(engine))
