"""docs/kubernetes: icc accepts the options that the manifests use, and the image stays small."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from icc.runtime.cli.serve import serve_command
from icc.runtime.errors import UsageError
from icc.runtime.ray.application import read_args
from icc.runtime.ray.library import SETTINGS
from icc.runtime.server.http.gate import OPEN

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs" / "kubernetes"
DEPLOYMENT, SERVICE = yaml.safe_load_all((FOLDER / "deployment.yaml").read_text())
RAY = yaml.safe_load((FOLDER / "rayservice.yaml").read_text())
CONTAINER = DEPLOYMENT["spec"]["template"]["spec"]["containers"][0]


def entrypoint() -> list[str]:
    found = re.search(r"^ENTRYPOINT (\[.*\])$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    assert found
    return json.loads(found[1])


def test_the_pod_starts_a_server_that_the_command_line_takes() -> None:
    icc, serve, *arguments = [*entrypoint(), *CONTAINER["args"]]
    assert (icc, serve) == ("icc", "serve")
    command: click.Command = serve_command
    given = command.make_context("serve", arguments, resilient_parsing=False).params
    assert given["host"] == "0.0.0.0" and given["port"] == CONTAINER["ports"][0]["containerPort"]
    assert given["engine"] == "/engine" and given["drain_s"] == 60 and given["threads"] == 4
    mounts = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert str(given["api_key_file"].parent) in mounts


def test_it_is_asked_where_no_key_is_needed_and_drains_before_it_is_killed() -> None:
    probes = [CONTAINER[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {probe["httpGet"]["path"] for probe in probes} <= OPEN
    pod = DEPLOYMENT["spec"]["template"]["spec"]
    pause = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + 60
    assert SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]["matchLabels"]
    assert SERVICE["spec"]["selector"].items() <= DEPLOYMENT["spec"]["template"]["metadata"]["labels"].items()
    assert SERVICE["spec"]["ports"][0]["targetPort"] == CONTAINER["ports"][0]["name"]
    names = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == names


def pods() -> list[dict[str, Any]]:
    cluster = RAY["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def test_every_pod_of_ray_has_the_settings_that_icc_needs() -> None:
    for pod in pods():
        [container] = pod["containers"]
        assert {one["name"]: one["value"] for one in container["env"]} == SETTINGS
        assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and RAY["spec"]["rayClusterConfig"]["rayVersion"] == pinned[1]


def test_the_serve_config_is_an_application() -> None:
    config = yaml.safe_load(RAY["spec"]["serveConfigV2"])
    [application] = config["applications"]
    module, _, function = application["import_path"].partition(":")
    assert function in dir(importlib.import_module(module))
    serve, ray = read_args(application["args"])
    assert serve.load.path == "/engine" and serve.api_key_file == Path("/keys/keys") and serve.drain_s == 60
    assert ray.scale == (1, 4) and ray.cpus == 4
    workers = RAY["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert workers["maxReplicas"] >= ray.scale[1]
    assert workers["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] == str(int(ray.cpus))


@pytest.mark.parametrize(
    ("args", "words"),
    [({}, "engine"), ({"engine": "a", "drain": 3}, "'drain'"), ({"engine": "a", "autoscale": "3"}, "LEAST-MOST"),
     ({"engine": "a", "threads": 0}, "threads"), ({"engine": "a", "command": ["sh"]}, "'command'")],
)  # fmt: skip
def test_wrong_arguments_of_a_serve_config_are_told(args: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_args(args)
    assert words in caught.value.message + caught.value.hint


def test_options_of_a_serve_config_reach_the_server() -> None:
    serve, ray = read_args({"engine": "a", "lora": ["x=b"], "threads": 2, "kv_bytes": 5, "replicas": 3, "name": "m"})
    assert serve.lora == ("x=b",) and (serve.load.threads, serve.load.kv_bytes) == (2, 5)
    assert serve.replicas == 3 and serve.name == "m" and ray.scale is None


def test_the_image_is_small() -> None:
    spec = importlib.util.spec_from_file_location("image_size", ROOT / "benchmarks" / "image_size.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = script.sizes()
    assert {"numpy", "tokenizers", "uvicorn", "icc-llm"} <= set(found) and not {"torch", "triton", "ray"} & set(found)
    assert 100e6 < sum(found.values()) + script.BASE < script.MOST
    text = (FOLDER / "Dockerfile").read_text()
    assert "--no-compile" in text and "-name tests" in text
    assert all(f"pip uninstall -y {name}" in text for name in script.LEFT_OUT)
