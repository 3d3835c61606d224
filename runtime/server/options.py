"""ServeOptions: the options of `icc serve`. Imports nothing of the server, so that a command line is parsed fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from ..options import LoadOptions
from ..settings import setting
from ..watermark.settings import FORM, Watermark
from ..watermark.settings import watermark as watermark_of
from .log import FORMATS, LEVELS

ROLES = {
    "prefill": "computes prompts for other servers, and answers nothing else",
    "decode": "has long prompts computed by the servers of --prefiller, and answers them",
}


@dataclass(frozen=True)
class ServeOptions:
    """Where to listen, for which clients, and how much load to accept; every setting is an option of `icc serve`.

    grpc_port: of the service for routers, see GrpcServer; 0: any free port, None: no gRPC. max_queue: completions
    accepted beyond a full batch; max_queue_tokens: tokens of all accepted requests. max_seconds: the latest deadline of
    a request, from when it is sent to the engine; None: no limit. max_wait_s: a request that would wait longer for its
    first step is refused; None: no limit. watchdog_s: an engine that sends nothing for so many seconds is ended and
    restarted. drain_s: seconds that running requests have to end after SIGTERM. batch_store: the SQLite file of the
    Batch API; None: no Batch API. name: the model's name in requests, or several separated by commas. cors_origins:
    origins of pages that may send requests ("*": all). root_path: the path under which a proxy serves the server.
    ssl_certfile and ssl_keyfile: PEM files, for HTTPS. vllm_metrics: metrics have vLLM's names too. otlp_endpoint:
    where OpenTelemetry spans go. chat_template: rendered within the same limits as the model's own. replicas, devices:
    see `replica_loads`. prefill_replicas: see EnginePool. prefiller: see Prefillers. role: see ROLES. nixl: see Nixl.
    watermark: of every answer, see Watermark. lora, lora_dir: adapters, which requests name as the model. judge: an
    engine that scores texts, see EngineJudge. prompt_cache, prompt_cache_bytes: see PromptFolder. prices: see Prices.
    kv_events, kv_events_replay, kv_events_topic: see KVPublisher. command: the engine process, for tests.
    """

    load: LoadOptions
    host: str = setting("127.0.0.1", "Address to listen on; any but this machine's own needs --api-key-file.")
    port: int = setting(8000, "0 takes a free one.")
    grpc_port: int | None = setting(
        None, "Answer routers over gRPC on this port too; 0 takes a free one.", metavar="N", unset="no gRPC"
    )
    name: str | None = setting(
        None,
        "What requests call the model; several names with commas.",
        names="--served-model-name --name",
        metavar="NAME[,NAME]",
        unset="the engine directory's name",
    )
    api_key_file: Path | None = setting(None, "Accepted API keys, one per line.", metavar="FILE")
    max_queue: int = setting(1024, "How many completions may wait beyond a full batch.")
    max_queue_tokens: int = setting(4 << 20, "The most tokens of all accepted requests.")
    max_wait_s: float | None = setting(
        None, "Refuse requests that would wait longer.", names="--max-wait", metavar="S", unset="never"
    )
    max_seconds: float | None = setting(None, "End a request after this time.", metavar="S", unset="never")
    watchdog_s: float = setting(10.0, "Restart an engine that is silent for so long.", names="--watchdog", metavar="S")
    drain_s: float = setting(30.0, "Time to finish requests after SIGTERM.", names="--drain", metavar="S")
    chat_template: Path | None = setting(
        None, "A Jinja chat template instead of the model's, or one of its own by name.", metavar="FILE|NAME"
    )
    replicas: int = setting(1, "Number of engine processes that share the requests.", metavar="N")
    prefill_replicas: int = setting(0, "How many of these compute long prompts for the others.", metavar="N")
    prefiller: tuple[str, ...] = setting(
        (), "A server that x-prefiller-host-port may name to compute a prompt; repeatable.", metavar="HOST:PORT"
    )
    role: str | None = setting(
        None,
        "Compute prompts for other servers, or answer prompts that others compute.",
        values=lambda: ROLES,
        unset="both",
    )
    nixl: bool = setting(False, "Exchange KV with other hosts through NIXL, if both servers have it.")
    devices: str | None = setting(None, "GPUs of the replicas, assigned in turn.", metavar="N,N", unset="--device")
    watermark: Watermark | None = setting(
        None, "Mark every answer for `icc detect`.", metavar=FORM, unset="none", read=watermark_of
    )
    lora: tuple[str, ...] = setting((), "Load this adapter; repeatable.", metavar="NAME=DIR")
    lora_dir: Path | None = setting(None, "Load adapters of this folder when a request names them.", metavar="DIR")
    judge: Path | None = setting(
        None, "Return the best_of answers that this engine of --task rerank scores highest.", metavar="ENGINE"
    )
    prompt_cache: Path | None = setting(
        None,
        "Keep prompts that requests ask to keep in this folder, across restarts.",
        metavar="DIR",
        unset="in memory",
    )
    prompt_cache_bytes: int | None = setting(
        None,
        "The most disk space for kept prompts, in GiB.",
        names="--prompt-cache-gib",
        metavar="GIB",
        unit=1 << 30,
        unset="16",
    )
    prices: Path | None = setting(
        None,
        "Report what tokens cost and what the prefix cache saves, by the prices in this JSON file.",
        metavar="FILE",
    )
    batch_store: Path | None = setting(
        None, "Offer the Batch API; its files are kept in this SQLite file.", metavar="FILE"
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "Allow requests from web pages of this origin (repeatable; * for every origin).",
        names="--cors-origin",
        metavar="ORIGIN",
    )
    root_path: str = setting("", "The path under which a proxy serves this server.", metavar="/PATH")
    ssl_certfile: Path | None = setting(None, "Serve HTTPS with this PEM certificate.", metavar="FILE")
    ssl_keyfile: Path | None = setting(
        None, "The certificate's PEM key, if it is not in the same file.", metavar="FILE"
    )
    log_format: str = setting("text", "How the log is written.", values=lambda: FORMATS)
    log_level: str = setting("info", "The lowest level that is logged.", values=lambda: LEVELS)
    vllm_metrics: bool = setting(False, "Give metrics under vLLM's names too.")
    otlp_endpoint: str | None = setting(
        None, "Send OpenTelemetry spans to this collector.", metavar="URL", unset="none are made"
    )
    kv_events: str | None = setting(
        None, "Publish what the prefix cache holds over ZeroMQ.", metavar="tcp://HOST:PORT", unset="it is not published"
    )
    kv_events_replay: str | None = setting(
        None, "Answer requests to repeat published batches.", metavar="tcp://HOST:PORT"
    )
    kv_events_topic: str = setting("", "The topic of published messages.", metavar="TOPIC")
    command: Sequence[str] | None = None


def check_role(options: ServeOptions) -> None:
    """UsageError for a role that contradicts --prefiller."""
    if options.role == "decode" and not options.prefiller:
        raise UsageError("--role decode: no server is given that computes prompts", "give --prefiller 10.0.0.5:8000")
    if options.role == "prefill" and options.prefiller:
        raise UsageError("--role prefill: this server computes prompts itself", "leave out --prefiller")


def adapter_paths(given: Sequence[str]) -> dict[str, Path]:
    """The directories of --lora options, by name. UsageError for a text that is not NAME=DIR."""
    found: dict[str, Path] = {}
    for item in given:
        name, equal, path = item.partition("=")
        if not (name and equal and path):
            raise UsageError(f"--lora {item!r} is not NAME=DIR", "give --lora sql=adapters/sql")
        if name in found:
            raise UsageError(f"--lora names {name!r} twice", "give each adapter a name of its own")
        found[name] = Path(path)
    return found


def adapter_folder(given: Path | None) -> Path | None:
    """The folder of --lora-dir, None for none. UsageError if it is not a directory."""
    if given is not None and not given.is_dir():
        raise UsageError(f"--lora-dir {given} is no directory", "it has adapters as folders and .gguf files")
    return given
