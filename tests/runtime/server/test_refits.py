"""POST /v1/refit: a running server loads other weights of its engine."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import icc
import pytest

KEY = "a-key-of-thirty-two-characters-00"
LIMITS = {"max_seq_len": 4000, "max_batch_size": 4}
Ask = Callable[..., tuple[int, Any]]


@pytest.fixture(scope="module")
def engines(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Engines of two checkpoints with the same architecture and sizes."""
    folder = tmp_path_factory.mktemp("engines")
    config = tiny.tiny_configs()["llama"]
    config.max_position_embeddings = 4096
    for seed in (0, 1):
        tiny.save_tiny(config, folder / f"model{seed}", seed=seed)
    return [icc.compile(folder / f"model{n}", folder / f"{n}.engine", target="native", **LIMITS) for n in (0, 1)]


@pytest.fixture
def served(engines: list[Path], tmp_path: Path) -> Iterator[tuple[Ask, Path]]:
    """A server of a copy of the first engine, with a key, and the path of the copy."""
    path = tmp_path / "model.engine"
    shutil.copytree(engines[0], path)
    with serving(path) as (ask, _):
        yield ask, path


@contextmanager
def serving(path: Path, *options: str) -> Iterator[tuple[Ask, subprocess.Popen[bytes]]]:
    """A server of an engine, with a key."""
    tmp_path = path.parent
    (tmp_path / "keys").write_text(KEY)
    command = [sys.executable, "-m", "icc.compiler.cli", "serve", str(path), "--port", "0", *options]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, "--api-key-file", str(tmp_path / "keys")], stdout=log, stderr=log)
    try:
        end = time.monotonic() + 120
        while not (found := re.search(r"serving model on (http://\S+)", (tmp_path / "log").read_text())):
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.05)

        def ask(route: str, key: str = KEY, **body: Any) -> tuple[int, Any]:
            data = None if route == "/metrics" else json.dumps(body).encode()
            request = urllib.request.Request(found[1] + route, data)
            request.add_header("Authorization", f"Bearer {key}")
            try:
                with urllib.request.urlopen(request, timeout=60) as reply:
                    return reply.status, json.load(reply) if data else reply.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, json.load(error)

        yield ask, process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def answer(ask: Ask, tokens: int = 4) -> list[float]:
    fields = {"max_tokens": tokens, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    status, found = ask("/v1/completions", model="model", prompt=[5, 9, 33, 70], **fields)
    assert status == 200, found
    return found["choices"][0]["logprobs"]["token_logprobs"]


def put(engine: Path, path: Path) -> None:
    """Replace the engine at `path` as `icc refit` does."""
    shutil.move(path, path.with_suffix(".old"))
    shutil.copytree(engine, path)
    shutil.rmtree(path.with_suffix(".old"))


def test_new_weights(served: tuple[Ask, Path], engines: list[Path]) -> None:
    """Running requests end with the old weights, and none is dropped."""
    ask, path = served
    before = answer(ask)
    running: list[list[float]] = []
    thread = threading.Thread(target=lambda: running.append(answer(ask, 400)))
    thread.start()
    while not re.search(r"^icc:num_requests_running\S* [1-9]", ask("/metrics")[1], re.MULTILINE):
        assert thread.is_alive()
    put(engines[1], path)
    assert ask("/v1/refit") == (200, {"status": "refitted"})
    thread.join()
    assert running[0][:4] == pytest.approx(before, abs=1e-5) and len(running[0]) == 400
    after = answer(ask)
    assert after != pytest.approx(before, abs=1e-3)
    put(engines[0], path)
    assert ask("/v1/refit", wait_s=0)[0] == 200
    assert answer(ask) == pytest.approx(before, abs=1e-5)


def test_another_engine_under_load(engines: list[Path], tmp_path: Path, tiny: Any) -> None:
    """The change is made by name, and by SIGHUP after a symbolic link changed; two replicas drop no stream."""
    for number in (0, 1):
        shutil.copytree(engines[number], tmp_path / f"{number}.engine")
    small = {"target": "native", "quant": "rtn4", **LIMITS}
    icc.compile(engines[0].parent / "model0", tmp_path / "rtn4.engine", **small)
    path = tmp_path / "model.engine"
    path.symlink_to("0.engine")
    with serving(path, "--name", "model", "--replicas", "2", "--threads", "1") as (ask, process):
        before, lengths = answer(ask), list[int]()

        def talk() -> None:
            for _ in range(4):
                lengths.append(len(answer(ask, 300)))

        talkers = [threading.Thread(target=talk) for _ in range(4)]
        for thread in talkers:
            thread.start()
        assert ask("/v1/engine", engine="rtn4.engine") == (200, {"status": "changed"})
        for thread in talkers:
            thread.join()
        assert lengths == [300] * 16
        assert answer(ask) == pytest.approx(before, abs=1) and answer(ask) != pytest.approx(before, abs=1e-4)
        assert ask("/v1/engine", engine="1.engine", wait_s=0)[0] == 200
        changed = answer(ask)
        assert ask("/v1/engine", engine="model.engine", wait_s=0)[0] == 200
        assert answer(ask) == pytest.approx(before, abs=1e-5)
        path.unlink()
        path.symlink_to("1.engine")
        process.send_signal(signal.SIGHUP)
        log, end = tmp_path / "log", time.monotonic() + 120
        while "loaded anew" not in log.read_text():
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        assert answer(ask) == pytest.approx(changed, abs=1e-5)
        for name, status in (("../1.engine", 400), ("..", 400), ("none.engine", 409), ("keys", 409)):
            assert ask("/v1/engine", engine=name)[0] == status, name
        tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path / "other")
        icc.compile(tmp_path / "other", tmp_path / "other.engine", target="native", max_seq_len=64)
        status, found = ask("/v1/engine", engine="other.engine")
        assert status == 409 and "has another model" in found["error"]["message"], found
        path.unlink()
        path.symlink_to("other.engine")
        process.send_signal(signal.SIGHUP)
        while "the engine stays as it is" not in log.read_text():
            assert time.monotonic() < end + 30, log.read_text()
            time.sleep(0.05)
        assert answer(ask) == pytest.approx(changed, abs=1e-5)


def test_what_is_refused(served: tuple[Ask, Path], engines: list[Path], tiny: Any, tmp_path: Path) -> None:
    ask, path = served
    before = answer(ask)
    assert ask("/v1/refit", key="wrong")[0] == 401
    assert ask("/v1/refit", wait_s=-1)[0] == 400
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path / "other")
    other = icc.compile(tmp_path / "other", tmp_path / "other.engine", target="native", quant="rtn4", max_seq_len=64)
    put(other, path)
    status, found = ask("/v1/refit")
    assert status == 409 and "has another model" in found["error"]["message"], found
    put(engines[1], path)
    raw = bytearray((path / "weights.safetensors").read_bytes())
    raw[-1] ^= 1
    (path / "weights.safetensors").write_bytes(raw)
    status, found = ask("/v1/refit")
    assert status == 409 and "weights.safetensors has changed" in found["error"]["message"]
    shutil.rmtree(path)
    status, found = ask("/v1/refit")
    assert status == 409 and "does not exist" in found["error"]["message"]
    assert answer(ask) == pytest.approx(before, abs=1e-5)
