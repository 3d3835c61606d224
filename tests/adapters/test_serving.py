"""Adapters of a server: listed as models, loaded and unloaded while it runs, found by name; and adapters of the
commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import icc
import psutil
import pytest
from icc import SamplingParams
from peft_models import save_adapter

IDS = [5, 9, 33, 70, 2, 8]
TARGETS = ["q_proj", "v_proj", "down_proj"]
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters one and two."""
    found = tmp_path_factory.mktemp("hot")
    for seed, name in enumerate(("one", "two")):
        save_adapter(model("llama"), found / name, seed, 0.3, r=4, target_modules=TARGETS)
    return found


@pytest.fixture(scope="module")
def path(engine: Callable[..., Path]) -> Path:
    return engine("llama", adapters="2x16")


@pytest.fixture(scope="module")
def expected(path: Path, folder: Path) -> dict[str, list[float]]:
    """The log-probabilities of six tokens after IDS, by adapter; "base" for none."""
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
    with icc.load(path) as llm:
        for name in ("one", "two"):
            llm.load_adapter(name, folder / name)
        found = llm.generate([IDS] * 3, params, adapter=[None, "one", "two"])
    answers = [[one.logprob for one in completion.logprobs or ()] for completion in found]
    return dict(zip(("base", "one", "two"), answers, strict=True))


@pytest.fixture(scope="module")
def server(path: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ask, psutil.Process]]:
    """A server that has loaded adapter one, and finds adapter two in a folder."""
    log = tmp_path_factory.mktemp("log") / "log"
    command = [sys.executable, "-m", "icc.compiler.cli", "serve", str(path), "--port", "0", "--name", "base"]
    command += ["--lora", f"one={folder / 'one'}", "--lora-dir", str(folder)]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 60
        while not (found := re.search(r"serving base on (http://\S+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)

        def ask(route: str, body: Any = None, text: bool = False) -> Any:
            data = None if body is None else json.dumps(body).encode()
            try:
                with urllib.request.urlopen(urllib.request.Request(found[1] + route, data), timeout=60) as reply:
                    return reply.read().decode() if text else (reply.status, json.load(reply))
            except urllib.error.HTTPError as error:
                return error.code, json.load(error)

        yield ask, psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def complete(ask: Ask, **fields: Any) -> list[float]:
    fields = {"prompt": IDS, "max_tokens": 6, "temperature": 0, "logprobs": 0, "ignore_eos": True, **fields}
    status, answer = ask("/v1/completions", fields)
    assert status == 200, answer
    assert answer["model"] == fields["model"]
    return answer["choices"][0]["logprobs"]["token_logprobs"]


def test_adapters_are_models(
    server: tuple[Ask, psutil.Process], expected: dict[str, list[float]], folder: Path
) -> None:
    ask, _ = server
    assert complete(ask, model="base") == pytest.approx(expected["base"], abs=1e-5)
    assert complete(ask, model="one") == pytest.approx(expected["one"], abs=1e-5)
    assert complete(ask, model="base", lora="one") == pytest.approx(expected["one"], abs=1e-5)
    assert complete(ask, model="two") == pytest.approx(expected["two"], abs=1e-5)  # found in the folder
    models = {one["id"]: one for one in ask("/v1/models")[1]["data"]}
    assert list(models) == ["base", "one", "two"]
    assert models["base"]["parent"] is None and models["two"]["parent"] == "base"
    assert models["one"]["root"] == str(folder / "one")
    assert [one["name"] for one in ask("/lora-adapters")[1]] == ["one", "two"]


def test_scales(server: tuple[Ask, psutil.Process], expected: dict[str, list[float]], path: Path, folder: Path) -> None:
    """The scale of a request, as in llama.cpp's server, and the scale of all requests that name no adapter."""
    ask, _ = server
    whole, half = folder / "one", folder.parent / "half"
    shutil.copytree(whole, half, dirs_exist_ok=True)
    config = json.loads((half / "adapter_config.json").read_text())
    (half / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] / 2}))
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
    with icc.load(path) as llm:
        llm.load_adapter("half", half)
        [found] = llm.generate([IDS], params, adapter="half")
    halved = pytest.approx([one.logprob for one in found.logprobs or ()], abs=1e-5)
    assert complete(ask, model="two") == pytest.approx(expected["two"], abs=1e-5)  # found in the folder
    ids = {one["name"]: one["id"] for one in ask("/lora-adapters")[1]}
    one, two = ids["one"], ids["two"]
    for _ in range(2):  # the second time out of the prefix cache
        assert complete(ask, model="base", lora=[{"id": one, "scale": 0.5}]) == halved
        assert complete(ask, model="base", lora=[{"id": one, "scale": 1.0}]) == pytest.approx(expected["one"], abs=1e-5)
        assert complete(ask, model="base", lora=[{"id": one, "scale": 0.0}]) == pytest.approx(
            expected["base"], abs=1e-5
        )
    assert complete(ask, model="base") != halved
    assert ask("/lora-adapters", [{"id": one, "scale": 0.5}])[0] == 200
    assert {one["name"]: one["scale"] for one in ask("/lora-adapters")[1]}["one"] == 0.5
    assert complete(ask, model="base") == halved
    assert complete(ask, model="base", lora=[]) == pytest.approx(expected["base"], abs=1e-5)
    assert complete(ask, model="one") == pytest.approx(expected["one"], abs=1e-5)
    assert ask("/lora-adapters", [])[0] == 200
    assert complete(ask, model="base") == pytest.approx(expected["base"], abs=1e-5)
    for wrong, words in (
        ([{"id": 77, "scale": 1}], "there is no adapter 77"),
        ([{"id": one, "scale": 1}, {"id": two, "scale": 1}], "runs with one adapter"),
        ([{"id": one, "scale": 1e9}], "scale"),
        ([{"id": one, "scale": 1, "more": 1}], "more"),
        ({"id": one, "scale": 1}, "object"),
    ):
        expected_status = 404 if "77" in words else 400
        status, answer = ask("/v1/completions", {"model": "base", "prompt": IDS, "lora": wrong})
        assert status == expected_status and words in answer["error"]["message"], answer
        status, answer = ask("/lora-adapters", wrong)
        assert status == expected_status and words in answer["error"]["message"], answer
    status, answer = ask("/v1/completions", {"model": "one", "prompt": IDS, "lora": [{"id": one, "scale": 1}]})
    assert status == 400 and "leave one out" in answer["error"]["message"]
    status, answer = ask("/v1/completions", {"model": "one", "prompt": IDS, "lora": "two"})
    assert status == 400 and "leave one out" in answer["error"]["message"]
    assert complete(ask, model="one", lora="one") == pytest.approx(expected["one"], abs=1e-5)


def test_a_prompt_is_kept_for_its_adapter(server: tuple[Ask, psutil.Process]) -> None:
    """`prompt_cache_retention` keeps a prompt separately for each adapter and for the base."""
    ask, _ = server
    asked = {"prompt": [7 + n % 90 for n in range(60)], "max_tokens": 1, "prompt_cache_retention": "24h"}

    def kept() -> int:
        lines = ask("/metrics", text=True).splitlines()
        [value] = [line.split()[-1] for line in lines if line.startswith("icc:prompts_kept")]
        return int(float(value))

    def cached(model: str) -> int:
        status, answer = ask("/v1/completions", {**asked, "model": model})
        assert status == 200, answer
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    before = kept()
    for count, model in enumerate(("one", "base", "two"), 1):
        assert cached(model) == 0 and cached(model) >= 16
        end = time.monotonic() + 20
        while kept() < before + count:
            assert time.monotonic() < end
            time.sleep(0.05)
    assert ask("/v1/completions", {**asked, "model": "three"})[0] == 404


def test_the_gauge_that_routers_read(server: tuple[Ask, psutil.Process]) -> None:
    ask, _ = server
    complete(ask, model="one")
    end, labels, value = time.monotonic() + 20, dict[str, str](), "0"
    while "one" not in labels.get("running_lora_adapters", "").split(",") or labels["waiting_lora_adapters"]:
        assert time.monotonic() < end, labels
        complete(ask, model="base")  # statistics come with steps, a few times per second
        time.sleep(0.1)
        if found := re.search(r"^vllm:lora_requests_info\{(.*)\} (\S+)$", ask("/metrics", text=True), re.M):
            labels, value = dict(re.findall(r'(\w+)="([^"]*)"', found[1])), found[2]
    assert labels["max_lora"] == "2" and abs(float(value) - time.time()) < 60


@pytest.mark.parametrize("name", ["three", "../one", "..", "/etc", "one/../two", "a b", "x" * 300, ".hidden"])
def test_names_that_lead_nowhere(server: tuple[Ask, psutil.Process], name: str) -> None:
    ask, _ = server
    status, answer = ask("/v1/completions", {"model": name, "prompt": IDS})
    assert status == 404 and answer["error"]["code"] == "model_not_found"
    assert ask("/v1/completions", {"model": "base", "lora": name, "prompt": IDS})[0] in (400, 404)


def test_loaded_and_unloaded(
    server: tuple[Ask, psutil.Process], expected: dict[str, list[float]], folder: Path, tmp_path: Path
) -> None:
    ask, _ = server
    load = {"lora_name": "third", "lora_path": str(folder / "two")}
    assert ask("/v1/load_lora_adapter", load) == (200, {"status": "loaded"})
    assert complete(ask, model="third") == pytest.approx(expected["two"], abs=1e-5)
    status, answer = ask("/v1/load_lora_adapter", load)
    assert status == 400 and "there is a model 'third' already" in answer["error"]["message"]
    assert ask("/v1/load_lora_adapter", {**load, "lora_path": str(folder / "one"), "load_inplace": True})[0] == 200
    assert complete(ask, model="third") == pytest.approx(expected["one"], abs=1e-5)
    assert ask("/v1/unload_lora_adapter", {"lora_name": "third"}) == (200, {"status": "unloaded"})
    assert ask("/v1/completions", {"model": "third", "prompt": IDS})[0] == 404
    assert ask("/v1/unload_lora_adapter", {"lora_name": "third"})[0] == 404
    for name, path, message in (
        ("base", folder / "one", "there is a model 'base' already"),
        ("a b", folder / "one", "lora_name: Expected"),
        ("fourth", tmp_path, "cannot read"),
        ("fourth", tmp_path / "nowhere", "is no directory with an adapter"),
    ):
        status, answer = ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        assert status == 400 and message in answer["error"]["message"], answer
    assert complete(ask, model="base") == pytest.approx(expected["base"], abs=1e-5)


def test_a_faulty_adapter_of_the_folder(server: tuple[Ask, psutil.Process], folder: Path) -> None:
    """The error names the field of the request, not a path that the request does not have."""
    faulty = shutil.copytree(folder / "one", folder / "faulty")
    config = json.loads((faulty / "adapter_config.json").read_text())
    (faulty / "adapter_config.json").write_text(json.dumps({**config, "new_field": 1}))
    for fields in ({"model": "faulty"}, {"model": "base", "lora": "faulty"}):
        status, answer = server[0]("/v1/completions", {"prompt": IDS, **fields})
        assert status == 400 and "does not know the field 'new_field'" in answer["error"]["message"], answer
        assert answer["error"]["param"] == ("lora" if "lora" in fields else "model")
    shutil.rmtree(faulty)


def workers(server: psutil.Process) -> list[psutil.Process]:
    """The live engine processes of a server, without zombies: one, while none is being replaced."""
    alive = [child for child in server.children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "worker_main" in " ".join(child.cmdline())]


def test_a_new_engine_process_has_them_again(
    server: tuple[Ask, psutil.Process], expected: dict[str, list[float]]
) -> None:
    ask, process = server
    assert complete(ask, model="one") == pytest.approx(expected["one"], abs=1e-5)
    [worker] = workers(process)
    worker.kill()
    end = time.monotonic() + 60
    while not {one.pid for one in workers(process)} - {worker.pid} or ask("/ready")[0] != 200:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert complete(ask, model="one") == pytest.approx(expected["one"], abs=1e-5)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "icc.compiler.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))


def test_the_commands(path: Path, folder: Path, tmp_path: Path) -> None:
    ids = ["--ids", ",".join(map(str, IDS)), "--max-tokens", "6", "--temperature", "0", "--ignore-eos", "--json"]
    with icc.load(path) as llm:
        llm.load_adapter("one", folder / "one")
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        [wanted] = llm.generate([IDS], params, adapter="one")
    done = run("run", str(path), *ids, "--lora", str(folder / "one"))
    assert json.loads(done.stdout)["token_ids"] == list(wanted.token_ids), done.stderr
    refused = run("run", str(path), *ids, "--lora", str(tmp_path))
    assert refused.returncode == 48 and "adapter_config.json" in refused.stderr and "Traceback" not in refused.stderr

    body = {"model": "one", "prompt": IDS, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    target = tmp_path / "out.jsonl"
    done = run("batch", str(path), str(tmp_path / "in.jsonl"), str(target), "--lora", f"one={folder / 'one'}")
    assert done.returncode == 0, done.stderr
    assert json.loads(target.read_text())["response"]["status_code"] == 200
    assert run("batch", str(path), "x", "y", "--lora", "one").returncode == 2
