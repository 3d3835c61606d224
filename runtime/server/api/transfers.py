"""kv_transfer_params: one server computes a prompt, and another decodes from its KV."""

from __future__ import annotations

import socket

import msgspec
from msgspec import UNSET, UnsetType

from ..engine.engine_stream import EngineStream
from ..engine.kv_file import is_kv_name
from ..engine.messages import Submit
from .requests import KVTransferParams


def with_transfer(submit: Submit, params: KVTransferParams | None) -> Submit:
    """The Submit of a prompt whose KV goes to another server or comes from one. params: None for neither."""
    if params is None:
        return submit
    named = params.remote_engine_id or ""
    takes = named if params.do_remote_prefill else ""
    gives = named if params.do_remote_decode and is_kv_name(named) else ""
    return msgspec.structs.replace(submit, gives_kv=params.do_remote_decode, kv_name=gives, takes_kv=takes)


def transfer_of(stream: EngineStream) -> KVTransferParams | UnsetType:
    """The fields for the server that decodes; UNSET if no KV was published, or there are several prompts."""
    given = next(iter(stream.kv_given.values()), None)
    if given is None or len(stream.submits) > 1:
        return UNSET
    blocks = list(range(given.blocks))
    return KVTransferParams(False, True, given.name, blocks, socket.gethostname(), 0)
