"""`icc bench serve` reads the streams of other servers; stubs write each format as in the servers' sources.

vLLM: vllm-project/vllm, vllm/entrypoints/openai/completion/serving.py (030ea52effcb) and chat_completion/serving.py
(5e918640d7b6). OpenVINO: openvinotoolkit/model_server, src/llm/servable.cpp (008bd83c5cd3) and
apis/openai_completions.cpp (00fd51961c7f). llama.cpp: tools/server/server-context.cpp and server-task.cpp as in
llama_cpp_python 0.3.36; its older error events: ggml-org/llama.cpp pull 23884 and before.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from icc.runtime.errors import UsageError
from icc.runtime.loadtest.endpoint import Endpoint, Trace
from icc.runtime.loadtest.load import tokens_per_word
from icc.runtime.loadtest.summary import Slo, summarize

USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
# path, body -> status, content type, parts of the answer, which are sent with pauses
Answerer = Callable[[str, dict[str, Any]], tuple[int, str, list[bytes]]]


def events(*values: Any, end: bytes = b"data: [DONE]\n\n") -> list[bytes]:
    return [b"data: " + json.dumps(value).encode() + b"\n\n" for value in values] + [end]


def talk(answer: Answerer, path: str = "", chat: bool = False, work: Any = None) -> Any:
    """Run `work(endpoint)` (default: one request) against a stub server."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length) or b"{}")
        status, kind, parts = answer(head.split()[1], body)
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for part in parts:
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.002)
        writer.write(b"0\r\n\r\n")
        writer.close()

    async def run() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            endpoint = Endpoint(f"http://127.0.0.1:{port}{path}", "m", chat=chat, extra={"ignore_eos": True})
            return await (endpoint.ask("p", 4, 0.0) if work is None else work(endpoint))

    return asyncio.run(run())


def stream(*parts: bytes) -> Answerer:
    return lambda path, body: (200, "text/event-stream", list(parts))


def text(content: str, reason: str | None = None) -> dict[str, Any]:
    return {"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": content, "finish_reason": reason}]}


def delta(reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


def check(trace: Trace, pieces: int) -> None:
    assert trace.ok and trace.status == 200, trace
    assert len(trace.pieces) == pieces and (trace.prompt_tokens, trace.output_tokens) == (9, 4)
    assert trace.pieces == sorted(trace.pieces) and trace.sent < trace.pieces[0] <= trace.end


def test_vllm_completions() -> None:
    """Events with several tokens; the last of them has the reason, and a usage event without choices follows."""
    usage = {"choices": [], "usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 5}}}
    trace = talk(stream(*events(text("a"), text("b c"), text("", "length"), usage)))
    check(trace, 2)
    assert trace.cached_tokens == 5


def test_vllm_chat_says_first_who_speaks() -> None:
    """The event with the role has empty content; reasoning models use `reasoning`, older ones `reasoning_content`."""
    parts = events(
        delta(role="assistant", content=""),
        delta(reasoning="hm"),
        delta(reasoning_content="m"),
        delta(content="a"),
        delta("stop", content=""),
        {"choices": [], "usage": USAGE},
    )
    check(talk(stream(*parts), chat=True), 3)


def test_vllm_tokens_without_text_are_tokens() -> None:
    """With ignore_eos a random model generates special tokens, whose text is empty."""
    parts = events(text(""), text(""), text(""), text("", "length"), {"choices": [], "usage": USAGE})
    check(talk(stream(*parts)), 4)


def test_vllm_fails_in_the_middle_of_a_stream() -> None:
    trace = talk(stream(*events(text("a"), {"error": {"message": "Internal server error", "code": 500}})))
    assert not trace.ok and "Internal server error" in trace.error


def test_openvino_below_v3() -> None:
    """A base path of its own, a handshake event before the first text, usages of null, another object name, no ids."""
    asked: list[str] = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, str, list[bytes]]:
        asked.append(path)
        if path == "/v3/models":
            listed = {"object": "list", "data": [{"id": "ov", "object": "model", "owned_by": "OVMS"}]}
            return 200, "application/json", [json.dumps(listed).encode()]
        assert body["stream_options"] == {"include_usage": True}  # OpenVINO refuses any other option
        handshake = {**delta(role="assistant", content=None), "usage": None}
        more = [{**delta(content="several words"), "usage": None}, {**delta("length", content=" end"), "usage": None}]
        return 200, "text/event-stream", events(handshake, *more, {"choices": [], "usage": USAGE})

    async def work(endpoint: Endpoint) -> tuple[str, Trace]:
        return await endpoint.find_model(), await endpoint.ask("p", 4, 0.0)

    model, trace = talk(answer, "/v3", chat=True, work=work)
    assert model == "ov" and asked == ["/v3/models", "/v3/chat/completions"]
    check(trace, 2)


def test_openvino_refuses_in_its_own_form() -> None:
    said = {"error": "Mediapipe execution failed. MP status - INVALID_ARGUMENT: max_tokens exceeds limit"}
    trace = talk(lambda path, body: (400, "application/json", [json.dumps(said).encode()]), "/v3")
    assert trace.status == 400 and "max_tokens exceeds limit" in trace.error and not trace.ok


def test_llama_cpp() -> None:
    """Comments keep the connection alive; older servers send the usage with the last event; timings are ignored."""
    last = {**text("", "length"), "usage": USAGE, "timings": {"prompt_n": 9}}
    whole = b"".join([b":\n\n", *events(text("a"), text("b")), b": ping\n\n"]).replace(b"data: [DONE]\n\n", b"")
    check(talk(stream(whole[:40], whole[40:], *events(last))), 2)
    trace = talk(stream(*events(text("a"), end=b'error: {"code":500,"message":"no slot"}\n\n')))
    assert not trace.ok and "no slot" in trace.error


def test_lines_may_end_otherwise_and_be_cut_anywhere() -> None:
    whole = b"".join(events(text("é"), text("b", "stop"), {"choices": [], "usage": USAGE}, end=b"data: [DONE]"))
    whole = whole.replace(b"\\u00e9", "é".encode()).replace(b"\n", b"\r\n")
    check(talk(stream(*[whole[i : i + 7] for i in range(0, len(whole), 7)])), 2)


@pytest.mark.parametrize("end", [b"", b"data: "])
def test_a_stream_that_is_cut_off_is_no_answer(end: bytes) -> None:
    trace = talk(stream(*events(text("a"), text("b"), end=end or b"\n")))
    assert not trace.ok and trace.error == "the stream ended before it was complete"


def test_a_server_that_does_not_stream_is_no_answer() -> None:
    trace = talk(stream(json.dumps({**text("all of it", "stop"), "usage": USAGE}).encode()))
    assert not trace.ok and "all of it" in trace.error


def test_what_a_strict_server_refuses_is_left_out() -> None:
    """Like OpenAI itself, the server refuses ignore_eos; without stream_options there is no usage, so that pieces are
    counted."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, str, list[bytes]]:
        for name in ("ignore_eos", "stream_options"):
            if name in body:
                said = {"error": {"message": f"Unrecognized request argument supplied: {name}", "param": None}}
                return 400, "application/json", [json.dumps(said).encode()]
        return 200, "text/event-stream", events(text("a"), text("b"), text("c", "length"))

    async def work(endpoint: Endpoint) -> tuple[float, set[str], Trace]:
        return await tokens_per_word(endpoint), endpoint.left_out, await endpoint.ask("p", 3, 0.0)

    ratio, left_out, trace = talk(answer, work=work)
    assert ratio == 1.0 and left_out == {"ignore_eos", "stream_options"} and trace.ok
    found = summarize("x", [trace], Slo())
    assert found.output_tokens == 3 and found.ok == 1


def test_another_error_is_shown_and_nothing_is_left_out() -> None:
    said = {"object": "error", "message": "The model `x` does not exist.", "type": "NotFoundError", "code": 404}

    async def work(endpoint: Endpoint) -> None:
        with pytest.raises(OSError, match="does not exist"):
            await tokens_per_word(endpoint)
        assert not endpoint.left_out
        with pytest.raises(UsageError, match="404"):
            await endpoint.find_model()

    talk(lambda path, body: (404, "application/json", [json.dumps(said).encode()]), work=work)
