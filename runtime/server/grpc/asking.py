"""Converts messages of `VllmEngine` to requests of the API. Fields that icc does not support are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from smg_grpc_proto import vllm_engine_pb2 as pb

from ..api.decoding import converted
from ..api.errors import HttpError
from ..api.requests import CompletionRequest, EmbeddingRequest

_TEXTS_ONLY = "this engine reads texts only"
# fields that icc refuses, and why
_REFUSED = {
    "structural_tag": "icc has no structural tags: give json_schema, regex or grammar",
    "kv_transfer_params": "is the older form: give kv_transfer_params_json",
    "mm_inputs": _TEXTS_ONLY,
    "extra_mm_inputs": _TEXTS_ONLY,
    "media_refs": _TEXTS_ONLY,
}
# fields without presence, in which vLLM reads 0 as "not set"
_AS_SAID = (
    "min_p", "frequency_penalty", "presence_penalty", "top_k", "min_tokens", "ignore_eos", "skip_special_tokens",
    "include_stop_str_in_output",
)  # fmt: skip
_OR_ONE = ("top_p", "repetition_penalty", "n")
_OPTIONAL = ("logprobs", "prompt_logprobs", "seed", "truncate_prompt_tokens")
_LISTS = ("stop", "stop_token_ids")
_CONSTRAINTS: dict[str, Callable[[Any], tuple[str, Any]]] = {
    "json_schema": lambda value: ("guided_json", value),
    "regex": lambda value: ("guided_regex", value),
    "grammar": lambda value: ("guided_grammar", value),
    "choice": lambda value: ("guided_choice", list(value.choices)),
    "json_object": lambda value: ("structured_outputs", {"json_object": value}),
}
# spaces_between_special_tokens: answers are token ids, without spaces; grammar_from_first_token: always so here
_NO_DIFFERENCE = ("spaces_between_special_tokens", "grammar_from_first_token")
_SAMPLING = {
    "temperature", "max_tokens", "logit_bias",
    *_AS_SAID, *_OR_ONE, *_OPTIONAL, *_LISTS, *_CONSTRAINTS, *_NO_DIFFERENCE,
}  # fmt: skip
# the servicer handles request_id, stream and data_parallel_rank; original_text is only informative
_GENERATE = {
    "request_id", "tokenized", "text", "sampling_params", "stream", "kv_transfer_params_json", "data_parallel_rank"
}  # fmt: skip


def refuse_unknown(message: Message, where: str = "") -> None:
    """HttpError 400 for a field, of the message or of a nested one, whose number is unknown here."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        place = f"{where}: " if where else ""
        raise HttpError(
            400, f"{place}field number {unknown[0].field_number} is not known here", where or None, "unknown_field"
        )
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for one in [value] if isinstance(value, Message) else value:
            refuse_unknown(one, f"{where}.{field.name}" if where else field.name)


def completion_of(request: pb.GenerateRequest, max_len: int, replicas: int) -> CompletionRequest:
    """The completion request of a message. HttpError 400 names a field that icc does not support.

    max_len: the most tokens of an answer, used if max_tokens is not set. replicas: how many this server has, among
    which it chooses itself.
    """
    refuse_unknown(request)
    _check_fields(request, _GENERATE)
    if request.HasField("data_parallel_rank") and (request.data_parallel_rank or replicas > 1):
        raise _refused("data_parallel_rank", "this server chooses among its replicas itself")
    fields = {"model": "", "stream": request.stream, "prompt": _prompt(request)}
    if request.HasField("kv_transfer_params_json"):
        fields["kv_transfer_params"] = _json(request.kv_transfer_params_json, "kv_transfer_params_json")
    return converted({**fields, **_sampling(request.sampling_params, max_len)}, CompletionRequest)


def embedding_of(request: pb.EmbedRequest) -> EmbeddingRequest:
    """The embedding request of a message. HttpError 400 names a field that icc does not support."""
    refuse_unknown(request)
    _check_fields(request, {"request_id", "tokenized"})
    return converted({"model": "", "input": [_token_ids(request)]}, EmbeddingRequest)


def named_as_asked(error: HttpError, request: pb.GenerateRequest | pb.EmbedRequest) -> HttpError:
    """The error with the name of the gRPC field instead of the API's field."""
    names = {"input": "tokenized.input_ids"}
    if isinstance(request, pb.GenerateRequest):
        names = {"prompt": "text" if request.WhichOneof("input") == "text" else "tokenized.input_ids"}
        constraint = request.sampling_params.WhichOneof("constraint")
        if constraint is not None:
            names |= dict.fromkeys(("response_format", "structured_outputs", "guided_choice"), constraint)
            names |= {f"guided_{kind}": constraint for kind in ("json", "regex", "grammar")}
    if error.param is None:
        return error
    field = names.get(error.param.partition("[")[0], error.param)
    message = error.message.removeprefix(f"{error.param}: ")
    message = message if message.startswith(field) else f"{field}: {message}"
    return HttpError(error.status, message, field, error.code, error.retry_after)


def _check_fields(message: Message, known: set[str]) -> None:
    """HttpError 400 for a field that is set and not in `known`."""
    for field, _ in message.ListFields():
        if field.name not in known:
            raise _refused(field.name, _REFUSED.get(field.name, "icc does not have it"))


def _refused(field: str, why: str) -> HttpError:
    return HttpError(400, f"{field}: {why}", field, "unsupported_parameter")


def _prompt(request: pb.GenerateRequest) -> str | list[int]:
    if request.WhichOneof("input") is None:
        raise HttpError(400, "input: give tokenized or text", "input", "invalid_value")
    return request.text if request.WhichOneof("input") == "text" else _token_ids(request)


def _token_ids(request: pb.GenerateRequest | pb.EmbedRequest) -> list[int]:
    ids = list(request.tokenized.input_ids)
    if not ids:
        raise HttpError(400, "tokenized.input_ids: there are none", "tokenized.input_ids", "invalid_value")
    return ids


def _json(text: str, field: str) -> Any:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise HttpError(400, f"{field}: is no JSON object: {error}", field, "invalid_value") from error


def _sampling(params: pb.SamplingParams, max_len: int) -> dict[str, Any]:
    """The sampling fields of a completion request, as in vLLM's servicer: a setting that is not set is off, temperature
    is 1.0, and routers fill in the model's defaults (from GetModelInfo)."""
    _check_fields(params, _SAMPLING)
    fields: dict[str, Any] = {name: getattr(params, name) for name in _AS_SAID}
    fields |= {name: getattr(params, name) or 1 for name in _OR_ONE}
    fields |= {name: list(getattr(params, name)) for name in _LISTS}
    fields |= {name: getattr(params, name) for name in _OPTIONAL if params.HasField(name)}
    fields["temperature"] = params.temperature if params.HasField("temperature") else 1.0
    fields["max_tokens"] = params.max_tokens if params.HasField("max_tokens") else max_len
    if (least := min(params.logit_bias, default=0)) < 0:
        raise HttpError(400, f"logit_bias: {least} is no token id", "logit_bias", "invalid_value")
    if params.logit_bias:
        fields["logit_bias"] = {str(token): value for token, value in params.logit_bias.items()}
    constraint = params.WhichOneof("constraint")
    if constraint is not None:
        name, value = _CONSTRAINTS[constraint](getattr(params, constraint))
        fields[name] = value
    return fields
