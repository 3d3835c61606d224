"""Facts about the server and its model."""

from __future__ import annotations

import hashlib
import io
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from ...format.files import EngineFiles
from ...format.manifest import Manifest
from ...format.open_container import open_container
from ..api.errors import HttpError
from ..api.model import ServedModel

_CHUNK = 64 << 10  # bytes
_ANY_DAY = (1980, 1, 1, 0, 0, 0)  # fixed time of files in a zip: the same files give the same bytes


def model_info(model: ServedModel, manifest: Manifest, path: Path) -> pb.GetModelInfoResponse:
    """The facts with which routers register a worker. tokenizer_path: for routers on this host; others call
    GetTokenizer."""
    facts, path = manifest.model, path.resolve()  # absolute: the reader has another working directory
    sampling = {name: value for name, value in msgspec.structs.asdict(manifest.sampling).items() if value is not None}
    return pb.GetModelInfoResponse(
        model_path=str(path),
        is_generation=model.task == "generate",
        max_context_length=model.max_len,
        vocab_size=model.vocab_size,
        served_model_name=model.name,
        tokenizer_path="" if manifest.tokenizer_dir is None else str(path / manifest.tokenizer_dir),
        architectures=[facts.architecture],
        eos_token_ids=facts.eos_token_ids,
        pad_token_id=facts.pad_token_id or 0,
        bos_token_id=facts.bos_token_id or 0,
        max_req_input_len=model.max_len,
        default_sampling_params_json=msgspec.json.encode(sampling).decode() if sampling else "",
    )


def tokenizer_chunks(manifest: Manifest, path: Path) -> Iterator[common_pb2.GetTokenizerChunk]:
    """The files of the tokenizer as a zip in chunks; the last chunk has its SHA-256. HttpError 501 without a
    tokenizer."""
    files = EngineFiles(open_container(path), manifest.files, True, manifest.base)
    if not manifest.tokenizer_names:
        raise HttpError(501, "the engine has no tokenizer")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(manifest.tokenizer_names):
            entry = zipfile.ZipInfo(name, _ANY_DAY)
            archive.writestr(entry, files.read(f"{manifest.tokenizer_dir}/{name}"), zipfile.ZIP_DEFLATED)
    data = packed.getvalue()
    for at in range(0, len(data), _CHUNK):
        last = at + _CHUNK >= len(data)
        digest = hashlib.sha256(data).hexdigest() if last else ""
        yield common_pb2.GetTokenizerChunk(data=data[at : at + _CHUNK], sha256=digest)


def timestamp() -> str:
    """The current time in UTC, in ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
