"""The resources that replicas request from Ray, the number of replicas, and what is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import icc
import pytest
from icc.runtime.errors import MissingExtraError, UsageError
from icc.runtime.format.manifest import Manifest, ProgramEntry
from icc.runtime.options import LoadOptions
from icc.runtime.ray import library
from icc.runtime.ray.app import planned
from icc.runtime.ray.options import RayOptions, autoscale
from icc.runtime.ray.resources import replica_place
from icc.runtime.ray.same_engine import check_engine
from icc.runtime.ray.scaling import TARGET, policy, replica_load, replicas_wanted
from icc.runtime.server.engine.messages import Stats
from icc.runtime.server.options import ServeOptions

LOAD = LoadOptions("toy.engine")


def test_icc_needs_no_ray() -> None:
    code = "import sys, icc, icc.runtime.cli.serve, icc.runtime.cli.batch; icc.ray; print('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
    assert {"deployment", "map_batches"} <= set(dir(icc.ray)) and "ray" in icc.__all__


def test_without_ray_one_line_says_what_to_install(
    make_engine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in library.SETTINGS:
        monkeypatch.setenv(name, "")  # monkeypatch removes these variables after the test
    engine = make_engine()
    for call in (lambda: icc.ray.deployment(engine), lambda: icc.ray.map_batches(None, engine)):
        with pytest.raises(MissingExtraError) as caught:
            call()
        assert caught.value.hint == "pip install 'icc-llm[ray]'" and "\n" not in caught.value.message


@pytest.mark.parametrize("command", [["serve"], ["batch", "in.jsonl", "out.jsonl"]])
def test_a_command_without_ray_ends_with_that_line(
    command: list[str], make_engine: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a"}}\n')
    engine = str(make_engine())
    code = "import sys; sys.modules['ray'] = None; from icc.compiler.cli import main; main()"
    given = [command[0], engine, *command[1:], "--ray"]
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == MissingExtraError.exit_code and "Traceback" not in done.stderr, done.stderr
    assert "pip install 'icc-llm[ray]'" in done.stderr and not (tmp_path / "out.jsonl").exists()


def test_a_cpu_engine_gets_threads_for_its_cpus(toy_manifest: Callable[..., Manifest]) -> None:
    manifest = toy_manifest()
    place = replica_place(LOAD, manifest, RayOptions(cpus=3))
    assert place.actor == {"num_cpus": 3} and place.load.threads == 3 and place.bundles is None
    assert replica_place(LoadOptions("a", threads=2), manifest, RayOptions()).actor == {"num_cpus": 2}
    assert replica_place(LOAD, manifest, RayOptions()).load.threads  # the cores of this machine
    named = replica_place(LOAD, manifest, RayOptions(cpus=0.5, resources=("disk=1", "zone=0.5")))
    assert named.actor == {"num_cpus": 0.5, "resources": {"disk": 1, "zone": 0.5}} and named.load.threads == 1
    assert [named.fits(found) for found in ({"CPU": 4}, {"CPU": 4, "disk": 3, "zone": 9})] == [0, 3]


def test_ranks_are_on_one_machine(toy_manifest: Callable[..., Manifest]) -> None:
    from icc.runtime.format.manifest import rank_program

    own: ProgramEntry = toy_manifest().main
    three = {rank_program(rank): own for rank in range(3)}
    place = replica_place(LOAD, toy_manifest(programs=three), RayOptions(cpus=4))
    assert place.bundles == [{"CPU": 4}]
    with pytest.raises(UsageError, match="3 ranks"):
        replica_place(LOAD, toy_manifest(programs=three), RayOptions(cpus=2))
    gpu = {name: ProgramEntry("program.json", "weights.safetensors", []) for name in three}
    place = replica_place(LOAD, toy_manifest(programs=gpu, backend="cuda"), RayOptions())
    assert place.actor == {"num_cpus": 3, "num_gpus": 3} and place.bundles == [{"CPU": 3, "GPU": 3}]
    assert place.load.device is None and place.fits({"CPU": 64, "GPU": 8}) == 2


@pytest.mark.parametrize(
    ("serve", "ray", "words"),
    [
        ({"batch_store": Path("a")}, {}, "icc batch --ray"), ({"devices": "0"}, {}, "--devices"),
        ({"grpc_port": 0}, {}, "--grpc-port"),
        ({"kv_events": "tcp://a:1"}, {}, "--kv-events"), ({"ssl_certfile": Path("a")}, {}, "HTTPS"),
        ({"replicas": 2}, {"scale": (1, 2)}, "contradict"), ({"replicas": 0}, {}, "--replicas 0"),
        ({}, {"cpus": 0}, "--ray-cpus 0"), ({}, {"resources": ("a",)}, "NAME=N"), ({}, {"app": "a b"}, "no name"),
        ({"load": LoadOptions("x", cores="0-1")}, {}, "--cores"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_starts(
    serve: dict[str, Any], ray: dict[str, Any], words: str, make_engine: Callable[..., Path]
) -> None:
    engine = make_engine()
    load = LoadOptions(engine, cores=serve.pop("load").cores) if "load" in serve else LoadOptions(engine)
    with pytest.raises(UsageError, match=words):
        planned(ServeOptions(load, **serve), RayOptions(**ray))


def test_another_engine_on_a_machine_is_no_replica(make_engine: Callable[..., Path]) -> None:
    engine = make_engine()
    check_engine(engine, "")
    with pytest.raises(icc.IccError, match="another engine"):
        check_engine(engine, "0" * 64)


def test_least_and_most_replicas_are_read() -> None:
    assert autoscale("1-4") == (1, 4) and autoscale("2-2") == (2, 2)
    for wrong in ("", "4", "4-1", "0-2", "a-b", "1-9999"):
        with pytest.raises(ValueError, match="LEAST-MOST"):
            autoscale(wrong)


def test_a_replica_is_busy_by_its_queue_or_its_cache() -> None:
    assert replica_load(Stats(running=4, waiting=4, blocks_used=10), 8, 100) == 1.0
    assert replica_load(Stats(running=1, blocks_used=90), 8, 100) == 0.9
    assert replica_load(Stats(running=8, waiting=24), 8, 100) == 4.0


@pytest.mark.parametrize(
    ("loads", "now", "wanted"),
    [
        ([], 2, 2), ([0.0], 1, 1), ([TARGET], 1, 1), ([1.0], 1, 2), ([4.0], 1, 6), ([0.1, 0.1, 0.1], 3, 1),
        ([0.9, 0.6], 2, 2), ([1.5], 2, 4),
    ],
)  # fmt: skip
def test_as_many_replicas_as_the_work_needs(loads: list[float], now: int, wanted: int) -> None:
    assert replicas_wanted(dict(enumerate(loads)), now) == wanted

    context = SimpleNamespace(aggregated_metrics={"icc_load": dict(enumerate(loads))}, current_num_replicas=now)
    assert policy(context) == (wanted, {})
