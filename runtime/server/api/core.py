"""Core: a model that answers requests, without HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...options import LoadOptions
from ...reading.formats import AnswerFormat
from ...reading.probe import find_format
from ...templates.source import read_template_file
from ...templates.template_input import TemplateInput
from ...trust.engine_signature import require_signatures
from ...watermark.settings import Watermark
from ..engine.admission import Admission, Budget
from ..engine.engine_client import worker_command
from ..engine.engine_pool import EnginePool
from ..engine.prompt_folder import PromptFolder
from ..log import LogOptions
from ..replicas import replica_loads
from .adapters import ServedAdapters
from .changes import EngineChanges
from .generate import Generator
from .jobs import Jobs
from .keys import ApiKeys
from .model import open_model
from .prices import Prices
from .sandbox import Sandbox
from .tracing import Tracer

if TYPE_CHECKING:
    from .metrics import Metrics

log = logging.getLogger("icc.serve")


class Core:
    """The engine processes, the sandbox, and all between them and a request.

    max_queue: completions accepted beyond a full batch; max_queue_tokens: tokens of all accepted requests. max_seconds:
    the latest deadline of a request. max_wait_s: the longest wait that is accepted, see Budget. command: of the engine
    process, None for icc's own. log_options: how the engine process logs. otlp_endpoint: where spans go, see Tracer.
    chat_template: a file to use instead of the model's template. replicas, devices: see `replica_loads`.
    prefill_replicas: see EnginePool. role: see ROLES of options. adapters, adapter_folder: see ServedAdapters.
    watermark: of every answer; if it is set, requests can neither remove nor replace it. prompt_folder: where kept
    prompts are stored. prices: of tokens.
    """

    def __init__(
        self,
        load: LoadOptions,
        keys: ApiKeys,
        *,
        name: str | None = None,
        max_queue: int = 1024,
        max_queue_tokens: int = 4 << 20,
        watchdog_s: float = 10.0,
        max_seconds: float | None = None,
        max_wait_s: float | None = None,
        command: Sequence[str] | None = None,
        log_options: LogOptions | None = None,
        otlp_endpoint: str | None = None,
        chat_template: Path | None = None,
        replicas: int = 1,
        prefill_replicas: int = 0,
        role: str | None = None,
        devices: str | None = None,
        adapters: Mapping[str, Path] | None = None,
        adapter_folder: Path | None = None,
        watermark: Watermark | None = None,
        prompt_folder: PromptFolder | None = None,
        prices: Prices | None = None,
    ) -> None:
        self.model = open_model(Path(load.path), name, load.verify)
        if load.require_signature is not None:
            require_signatures(self.model.manifest, load)
        if chat_template is not None:
            self.model = replace(self.model, template=self.model.template.replaced(read_template_file(chat_template)))
        self._own_template = chat_template
        self._plain_salts = keys.plain_salts
        if prompt_folder is not None:
            prompt_folder.check(self.model.manifest)
        limits = self.model.manifest.limits
        loads = replica_loads(load, self.model.manifest, replicas, devices)
        if not 0 <= prefill_replicas < replicas:
            raise UsageError(
                f"--prefill-replicas {prefill_replicas} of --replicas {replicas} leaves none that answers",
                "give more --replicas",
            )
        self.max_batch_size = limits.max_batch_size * replicas

        def commands(path: Path) -> list[Sequence[str]]:
            of_path = [replace(one, path=path) for one in loads]
            logs = log_options or LogOptions()
            return [command or worker_command(one, logs, prompt_folder) for one in of_path]

        tokens = limits.max_batch_size * limits.max_seq_len
        moves_kv = f"--role {role}" if role else ""
        self.engine = EnginePool(commands(Path(load.path)), watchdog_s, tokens, prefill_replicas, moves_kv)
        self._sandbox = Sandbox(self.model.template)
        self.adapters = ServedAdapters(self.engine, self.model.names, adapter_folder, adapters or {})
        served = Path(load.path), self.model.manifest
        self.changes = EngineChanges(
            self.engine, self.adapters, *served, keys.required, commands, load.require_signature
        )
        gives_only = role == "prefill"
        self.jobs = Jobs(self.model, self._sandbox, keys, max_seconds, self.adapters, watermark, prices, gives_only)
        budget = Budget(self.max_batch_size + max_queue, max_queue_tokens, wait_s=max_wait_s)
        admission = Admission(budget, self._slots)
        self._tracer = None if otlp_endpoint is None else Tracer.open(self.model.name, otlp_endpoint)
        self.generator = Generator(self.engine, admission)
        if self._tracer is not None:
            self.generator.observers.append(self._tracer.request_ended)

    def observe(self, metrics: Metrics) -> None:
        """Count the engine's steps and all requests in `metrics`. Without this, a core needs no Prometheus library."""
        metrics.attach(self.engine)
        self.generator.observers.append(metrics.request_ended)

    def publish_kv(self, publish: Callable[[int, bytes | None], None]) -> None:
        """Publish the changes of the prefix caches; see `EnginePool.watch_kv`."""
        self.engine.watch_kv(self._plain_salts, publish)

    def _slots(self) -> int:
        """How many sequences run at once: a full batch, or fewer if the KV cache holds no more."""
        stats = self.engine.stats
        return stats.running if stats.waiting and stats.running else self.max_batch_size

    async def start(self) -> None:
        """Start the processes. IccError if the engine cannot be loaded."""
        await self._sandbox.start()
        if self._sandbox.template_error and self._own_template is not None:
            raise UsageError(f"--chat-template {self._own_template}: {self._sandbox.template_error}")
        if self._sandbox.template_error:
            log.warning("no chat: %s", self._sandbox.template_error)
        self.model.prompting.form = await self._answer_format()
        await self.engine.start()
        await self.adapters.load_first()
        if self.generator.judge is not None:
            await self.generator.judge.start()

    async def _answer_format(self) -> AnswerFormat:
        """How the model's answers are parsed, found from its template."""
        model = self.model
        if not model.template or self._sandbox.template_error:
            return AnswerFormat()

        async def render(messages: list[dict], tools: list[dict] | None, prompt: bool) -> str:
            return await self._sandbox.render(TemplateInput(messages, tools, prompt))

        return await find_format(model.template.all_texts, render, model.prompting.special_tokens)

    async def stop(self) -> None:
        """End the sandbox and the engine processes, and send the remaining spans."""
        await self._sandbox.stop()
        await self.engine.stop()
        if self.generator.judge is not None:
            await self.generator.judge.stop()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
