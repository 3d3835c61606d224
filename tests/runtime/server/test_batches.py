"""Files and batches: over HTTP with the openai client, across a restart, and offline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from icc.runtime.server.batches.batch_lines import read_lines

from .conftest import Served, StartServer

KEY = "a-key-of-some-length"


def line(number: int, prompt: str = "a", url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    request = {"model": "toy", "prompt": prompt, "max_tokens": 3, **body}
    if "chat" in url:
        request["messages"] = [{"role": "user", "content": request.pop("prompt")}]
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": request}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in lines)


def client_of(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key or "none", max_retries=0)


def finished(client: openai.OpenAI, batch_id: str, seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while (batch := client.batches.retrieve(batch_id)).status not in ("completed", "failed", "cancelled"):
        assert time.monotonic() < end, batch
        time.sleep(0.05)
    return batch


def by_id(content: bytes) -> dict[str, Any]:
    results = [json.loads(text) for text in content.splitlines()]
    assert len({result["custom_id"] for result in results}) == len(results), "a request was answered twice"
    return {result["custom_id"]: result["response"] for result in results}


def test_a_batch_over_http(start: StartServer, tmp_path: Path) -> None:
    server = start("--batch-store", str(tmp_path / "batches.db"), key=KEY)
    client = client_of(server)
    lines = [line(number, chr(97 + number)) for number in range(20)] + [
        line(20, max_tokens=-1),
        line(21, model="other"),
    ]
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    assert [found.id for found in client.files.list()] == [file.id] and file.bytes == len(jsonl(lines))
    assert client.files.content(file.id).content == jsonl(lines)
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"a": "b"}
    )
    done = finished(client, batch.id)
    assert done.status == "completed" and done.metadata == {"a": "b"}
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (22, 20, 2)
    answers = by_id(client.files.content(done.output_file_id).content)
    assert answers["r3"]["body"]["choices"][0]["text"] == "efg" and len(answers) == 20
    errors = by_id(client.files.content(done.error_file_id).content)
    assert {key: value["status_code"] for key, value in errors.items()} == {"r20": 400, "r21": 404}
    assert [found.id for found in client.batches.list()] == [batch.id]

    chat = jsonl([line(0, "x", "/v1/chat/completions")])
    file = client.files.create(file=("in.jsonl", chat), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    answer = by_id(client.files.content(finished(client, batch.id).output_file_id).content)["r0"]
    assert answer["body"]["choices"][0]["message"]["content"] == "\x0b\x0c\r"

    wrong = client.files.create(file=("in.jsonl", jsonl([line(0), line(0)]) + b"{\n"), purpose="batch")
    batch = client.batches.create(input_file_id=wrong.id, endpoint="/v1/completions", completion_window="24h")
    failed = finished(client, batch.id)
    assert failed.status == "failed" and [error.line for error in failed.errors.data] == [2, 3]
    client.files.delete(wrong.id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(wrong.id)
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id=wrong.id, endpoint="/v1/completions", completion_window="24h")


def test_a_batch_outlasts_a_server_that_is_killed(start: StartServer, tmp_path: Path) -> None:
    store = str(tmp_path / "batches.db")
    server = start("--batch-store", store, key=KEY)
    client = client_of(server)
    lines = [line(number, chr(97 + number % 20), max_tokens=700, ignore_eos=True) for number in range(60)]
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    server.wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 4)
    server.process.kill()
    server.process.wait()
    again = start("--batch-store", store, key=KEY)
    client = client_of(again)
    before = client.batches.retrieve(batch.id)
    assert before.status in ("in_progress", "finalizing", "completed") and 4 < before.request_counts.completed <= 60
    done = finished(client, batch.id)
    assert done.status == "completed" and done.request_counts.completed == 60
    assert len(by_id(client.files.content(done.output_file_id).content)) == 60
    # another key sees nothing of it
    (tmp_path / "keys").write_text(f"{KEY}\nanother-key-entirely\n")
    third = start("--batch-store", store, "--api-key-file", str(tmp_path / "keys"))
    other = openai.OpenAI(base_url=f"{third.url}/v1", api_key="another-key-entirely", max_retries=0)
    assert not other.files.list().data and not other.batches.list().data
    with pytest.raises(openai.NotFoundError):
        other.files.content(done.output_file_id)
    mine = openai.OpenAI(base_url=f"{third.url}/v1", api_key=KEY, max_retries=0)
    assert mine.batches.retrieve(batch.id).status == "completed"


def test_a_batch_that_is_cancelled_keeps_what_it_has(start: StartServer, tmp_path: Path) -> None:
    server = start("--batch-store", str(tmp_path / "batches.db"))
    client = client_of(server)
    lines = [line(number, max_tokens=2000, ignore_eos=True) for number in range(200)]
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    server.wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
    client.batches.cancel(batch.id)
    done = finished(client, batch.id)
    assert done.status == "cancelled" and 0 < done.request_counts.completed < 200
    assert len(by_id(client.files.content(done.output_file_id).content)) == done.request_counts.completed
    server.wait_until(server.idle)


BANNED = """
import sys
class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"fastapi", "starlette", "uvicorn", "uvloop", "httptools", "prometheus_client",
                                  "python_multipart", "llguidance", "jsonschema_rs"}:
            raise ModuleNotFoundError("banned: " + name, name=name)
sys.meta_path.insert(0, Ban())
"""


def offline(engine: Path, source: Path, target: Path) -> list[str]:
    return [sys.executable, "-m", "icc.compiler.cli", "batch", str(engine), str(source), str(target), "--threads", "1"]


def test_offline_goes_on_where_it_was_stopped(chat_engine: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(number, chr(97 + number % 20), max_tokens=700, ignore_eos=True) for number in range(50)]
    source.write_bytes(jsonl([*lines, line(50, url="/v1/chat/completions")]))
    process = subprocess.Popen(offline(chat_engine, source, target), stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while not target.exists() or target.read_bytes().count(b"\n") < 5:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = target.read_bytes().count(b"\n")
    assert before < 51
    with target.open("ab") as stream:
        stream.write(b'{"id": "cut of')  # a line cut short, as a crash may leave it
    done = subprocess.run(offline(chat_engine, source, target), capture_output=True, text=True)
    assert done.returncode == 0 and f"51 requests, {before} answered before" in done.stderr, done.stderr
    answers = by_id(target.read_bytes())
    assert len(answers) == 51 and all(answer["status_code"] == 200 for answer in answers.values())
    assert answers["r1"]["body"]["choices"][0]["text"].startswith("cdefgh")


def test_offline_needs_no_server_and_says_how_many_failed(chat_engine: Path, tmp_path: Path) -> None:
    """The packages of the extra `serve` are not imported either."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"url": "/v1/chat/completions"}
    lines = [line(0), line(1, max_tokens=-1), line(2, **chat), line(3, **chat, response_format={"type": "json_object"})]
    source.write_bytes(jsonl(lines))
    arguments = ["batch", str(chat_engine), str(source), str(target), "--threads", "1"]
    (tmp_path / "sitecustomize.py").write_text(BANNED)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    for words in ("4 answered now", "4 answered before"):
        done = subprocess.run(
            [sys.executable, "-m", "icc", *arguments],
            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert done.returncode == 42 and words in done.stderr, done.stderr
        assert done.stderr.splitlines()[-2:] == [
            "error: 2 of 4 requests failed", f"hint: their lines in {target} say why"
        ]  # fmt: skip
    assert "llguidance is not installed" in target.read_text()
    statuses = {name: answer["status_code"] for name, answer in by_id(target.read_bytes()).items()}
    assert statuses == {"r0": 200, "r1": 400, "r2": 200, "r3": 400}


def test_offline_mistakes_get_a_line(chat_engine: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl([line(0)]) + b"nonsense\n")
    done = subprocess.run(offline(chat_engine, source, tmp_path / "out"), capture_output=True, text=True)
    assert done.returncode == 2 and "line 2" in done.stderr and "Traceback" not in done.stderr
    source.write_bytes(jsonl([line(0)]))
    (tmp_path / "out").write_text("something else\n")
    done = subprocess.run(offline(chat_engine, source, tmp_path / "out"), capture_output=True, text=True)
    assert done.returncode == 2 and (tmp_path / "out").read_text() == "something else\n"
    done = subprocess.run(offline(chat_engine, source, Path("/dev/zero")), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "/dev/zero is no file" in done.stderr


def test_lines_are_checked() -> None:
    lines, wrong = read_lines(jsonl([line(0), line(1, url="/v1/chat/completions")]), "/v1/completions")
    assert [item.custom_id for item in lines] == ["r0"] and [number for number, _ in wrong] == [2]
    assert read_lines(b"")[1] and read_lines(b"\n\n")[1] and read_lines(b"\xff\n")[1] and read_lines(b"[" * 9999)[1]
