"""gRPC requests that are refused: the refusal names the field; and the status of every error."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from icc.runtime.server.api.errors import ClientGone, HttpError
from icc.runtime.server.grpc import asking
from icc.runtime.server.grpc.asking import completion_of, named_as_asked
from icc.runtime.server.grpc.errors import CODES, STATUS, as_call_error
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from ..conftest import Served
from .conftest import SERVICE, Client, generate_request

pytestmark = pytest.mark.slow


def test_what_the_engine_or_the_server_does_not_do_is_unimplemented(client: Client) -> None:
    calls = [
        lambda: client.stub.Embed(pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[1])), timeout=60),
        lambda: client.stub.FlushCache(common_pb2.FlushCacheRequest(), timeout=60),
        lambda: client.stub.StartProfile(common_pb2.StartProfileRequest(), timeout=60),
        lambda: client.stub.StopProfile(common_pb2.StopProfileRequest(), timeout=60),
    ]
    assert [client.fails(call).code() for call in calls] == [grpc.StatusCode.UNIMPLEMENTED] * 4


def unknown_field(message: Any) -> Any:
    """A copy of the message with a field that no definition here has: number 900, varint 1."""
    return type(message).FromString(message.SerializeToString() + b"\xa0\x38\x01")


REFUSED = {
    "no prompt": (pb.GenerateRequest(), "input: give tokenized or text"),
    "no tokens": (pb.GenerateRequest(tokenized=pb.TokenizedInput()), "tokenized.input_ids: there are none"),
    "tags": (generate_request(structural_tag="{}"), "structural_tag: icc has no structural tags"),
    "pixels": (pb.GenerateRequest(text="a", mm_inputs=pb.MultimodalInputs()), "mm_inputs: this engine reads texts"),
    "more pixels": (pb.GenerateRequest(text="a", extra_mm_inputs=[pb.MultimodalInputs()]), "extra_mm_inputs: this"),
    "media": (pb.GenerateRequest(text="a", media_refs=pb.MediaRefs()), "media_refs: this engine reads texts only"),
    "mooncake": (
        pb.GenerateRequest(text="a", kv_transfer_params=pb.KvTransferParams()), "kv_transfer_params: is the older form"
    ),
    "no JSON": (
        pb.GenerateRequest(text="a", kv_transfer_params_json="["), "kv_transfer_params_json: is no JSON object"
    ),
    "a rank": (pb.GenerateRequest(text="a", data_parallel_rank=1), "data_parallel_rank: this server chooses"),
    "unknown": (unknown_field(pb.GenerateRequest(text="a")), "field number 900 is not known here"),
    "unknown inside": (
        pb.GenerateRequest(text="a", sampling_params=unknown_field(pb.SamplingParams())),
        "sampling_params: field number 900 is not known here",
    ),
    "all logprobs": (generate_request(logprobs=-1), "logprobs: "),
    "too hot": (generate_request(temperature=1e9), "temperature: "),
    "too many": (generate_request(n=1000), "n: "),
    "top_p": (generate_request(top_p=1.5), "top_p: "),
    "a bias for no token": (generate_request(logit_bias={-1: 1.0}), "logit_bias"),
    "no schema": (generate_request(json_schema="{"), "json_schema: "),
    "no choices": (generate_request(choice=pb.ChoiceConstraint()), "choice"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_icc_does_not_do_is_refused_by_the_name_of_the_field(case: str, client: Client) -> None:
    request, words = REFUSED[case]
    error = client.fails(lambda: list(client.stub.Generate(request, timeout=60)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and error.details().startswith(words), error.details()
    assert "\n" not in error.details()


def test_a_message_that_cannot_be_read_is_the_caller_s_mistake(client: Client, server: Served) -> None:
    """grpc's own answer would be UNKNOWN, with the name of a class, and a traceback in the log."""
    generate = client.channel.unary_stream(f"/{SERVICE}/Generate")
    abort = client.channel.unary_unary(f"/{SERVICE}/Abort")
    for call in (lambda: list(generate(b"\xff\xff\xff", timeout=60)), lambda: abort(b"\xff\xff\xff", timeout=60)):
        error = client.fails(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details().startswith("the message is not of the type that /vllm.grpc"), error.details()
    assert "Traceback" not in server.log.read_text()


def test_every_field_of_a_request_is_used_or_refused() -> None:
    """A field that a later smg-grpc-proto adds must not be ignored: this test fails until it is supported or listed as
    refused."""
    assert {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} == asking._GENERATE | {
        name for name in asking._REFUSED if name in pb.GenerateRequest.DESCRIPTOR.fields_by_name
    }
    assert {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} == asking._SAMPLING | {"structural_tag"}


def test_what_is_not_said_is_as_vllm_s_servicer_has_it() -> None:
    request = completion_of(pb.GenerateRequest(text="a"), 100, 1)
    said = (
        request.temperature,
        request.top_p,
        request.top_k,
        request.repetition_penalty,
        request.n,
        request.max_tokens,
    )
    assert said == (1.0, 1, 0, 1, 1, 100) and request.seed is None and request.logprobs is None
    for constraint, field in {
        "json_schema": "guided_json",
        "grammar": "guided_grammar",
        "regex": "guided_regex",
    }.items():
        one = completion_of(generate_request(**{constraint: '{"type": "object"}'}), 100, 1)
        assert getattr(one, field) == '{"type": "object"}'
    one = completion_of(generate_request(json_object=True), 100, 1)
    assert one.structured_outputs is not None and one.structured_outputs.json_object
    error = named_as_asked(HttpError(400, "no", "response_format"), generate_request(grammar="x"))
    assert (error.message, error.param) == ("grammar: no", "grammar")


def test_every_error_has_a_status() -> None:
    expected = {
        400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
        408: "DEADLINE_EXCEEDED", 409: "ALREADY_EXISTS", 413: "RESOURCE_EXHAUSTED", 429: "RESOURCE_EXHAUSTED",
        499: "CANCELLED", 500: "INTERNAL", 501: "UNIMPLEMENTED", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED",
    }  # fmt: skip
    assert {status: code.name for status, code in STATUS.items()} == expected and list(CODES) == ["unsupported"]
    assert as_call_error(ClientGone()).status is grpc.StatusCode.CANCELLED
    found = as_call_error(RuntimeError("a secret"))
    assert found.status is grpc.StatusCode.INTERNAL and "secret" not in found.message
