"""Servicer: the service VllmEngine of smg-grpc-proto, over the same objects as the HTTP routes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import grpc
import msgspec
import numpy as np
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from .... import __version__
from ..api.core import Core
from ..api.embeddings import vectors_of
from ..api.errors import ClientGone, HttpError, as_http
from ..api.gate import RequestGate
from ..api.jobs import Job
from . import loads
from .answers import GenerateAnswer
from .asking import completion_of, embedding_of, named_as_asked, refuse_unknown
from .calls import Calls, RunningCall, RunningCalls, seconds_left
from .facts import model_info, timestamp, tokenizer_chunks
from .kv_feed import KVFeed

Context = grpc.aio.ServicerContext


@dataclass
class Servicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Answers the calls of VllmEngine. kv: None for an engine without a prefix cache."""

    core: Core
    gate: RequestGate
    kv: KVFeed | None
    started: float = field(default_factory=time.time)  # seconds since 1970

    def __post_init__(self) -> None:
        self._calls, self._running, self._loads = Calls(self.gate), RunningCalls(), loads.ReplicaLoads()

    @property
    def is_healthy(self) -> bool:
        """Whether requests are accepted: the engine is loaded, and the server does not shut down."""
        return bool(self.core.engine.ready) and not self.gate.draining

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Complete a prompt: chunks as they come, if the request streams, and the end of each completion."""
        async with self._calls.call(context, "Generate", request_id=request.request_id, queued=True) as client:
            self.core.model.check_task("generate")
            with self._running.named(client, request.request_id) as running:
                job = await self._job(request, client, context)
                await self._generate(request.stream, job, running, context)

    async def _job(self, request: pb.GenerateRequest, client: str, context: Context) -> Job:
        left = seconds_left(context)
        with _named_as(request):
            asked = completion_of(request, self.core.model.max_len, len(self.core.engine.replicas))
            return _within(await self.core.jobs.completion(asked, client), left)

    async def _generate(self, streamed: bool, job: Job, running: RunningCall, context: Context) -> None:
        answer: GenerateAnswer | None = None
        try:
            with self.core.generator.started(job, whole=not streamed) as run:
                running.sent(run.stream)
                answer = GenerateAnswer(job, run.stream, streamed)
                if streamed:
                    async for deltas in run.deltas():
                        for response in answer.responses(deltas):
                            await context.write(response)
                else:
                    for response in answer.responses(await run.all_deltas()):
                        await context.write(response)
        except ClientGone:  # aborted by an Abort call; the reader of this answer is still there
            for response in answer.aborted() if answer is not None else ():
                await context.write(response)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse | None:  # noqa: N802
        """The vector of a text, which is given as token ids."""
        async with self._calls.call(context, "Embed", request_id=request.request_id, queued=True) as client:
            self.core.model.check_task("embed")
            with self._running.named(client, request.request_id) as running:
                left = seconds_left(context)
                with _named_as(request):
                    job = _within(await self.core.jobs.embedding(embedding_of(request), client), left)
                [raw] = [vector async for vector in vectors_of(self.core.generator, job, running.sent)]
                vector = np.frombuffer(raw, dtype="<f4")
                return pb.EmbedResponse(
                    embedding=vector.tolist(), prompt_tokens=job.prompt_tokens, embedding_dim=len(vector)
                )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse | None:  # noqa: N802
        """Abort requests of the client; ids of no running request are ignored."""
        async with self._calls.call(context, "Abort") as client:
            refuse_unknown(request)
            self._running.abort(client, request.request_ids)
            return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:  # noqa: N802
        """Whether requests are accepted; needs no key, like /ready."""
        why = "the server is shutting down" if self.gate.draining else "the engine is not ready"
        return pb.HealthCheckResponse(healthy=self.is_healthy, message="ready" if self.is_healthy else why)

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse | None:
        """The facts about the served model."""
        async with self._calls.call(context, "GetModelInfo"):
            return model_info(self.core.model, self.core.changes.manifest, self.core.changes.path)

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse | None:
        """The state of the server. Routers see one replica: the server chooses among its replicas itself."""
        async with self._calls.call(context, "GetServerInfo"):
            ready = self.core.engine.ready
            return pb.GetServerInfoResponse(
                active_requests=self.core.generator.admission.requests,
                is_paused=self.gate.draining,
                last_receive_timestamp=self._calls.last_received,
                uptime_seconds=time.time() - self.started,
                server_type="icc-grpc",
                data_parallel_size=1,
                block_size=ready[0].prefix_blocks[0] if ready else 0,
                max_num_seqs=self.core.max_batch_size,
                constrained_decoding_start="first_token",
            )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse | None:  # noqa: N802
        """The load of each replica."""
        async with self._calls.call(context, "GetLoads"):
            refuse_unknown(request)
            replicas = self.core.engine.replicas
            other = next((name for name in request.include if name not in loads.SECTIONS), None)
            if other is not None:
                raise HttpError(400, f"include: there is no section {other[:80]!r}", "include")
            if request.HasField("dp_rank") and not 0 <= request.dp_rank < len(replicas):
                raise HttpError(400, f"dp_rank: there are {len(replicas)} replicas, from 0 on", "dp_rank")
            asked = replicas[request.dp_rank : request.dp_rank + 1] if request.HasField("dp_rank") else replicas
            found = [self._loads.load(replica) for replica in asked]
            return pb.GetLoadsResponse(
                timestamp=timestamp(), version=__version__, dp_rank_count=len(replicas), loads=found
            )

    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: Context) -> None:  # noqa: N802
        """The files of the tokenizer, as a zip in chunks."""
        async with self._calls.call(context, "GetTokenizer"):
            changes = self.core.changes
            chunks = await asyncio.to_thread(lambda: list(tokenizer_chunks(changes.manifest, changes.path)))
            for chunk in chunks:
                await context.write(chunk)

    async def SubscribeKvEvents(  # noqa: N802
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> None:
        """The contents of the prefix caches, then every change. Batches carry no load: routers call GetLoads."""
        async with self._calls.call(context, "SubscribeKvEvents"):
            refuse_unknown(request)
            if self.kv is None:
                raise HttpError(501, "this engine computes vectors, and has no prefix cache")
            await context.send_initial_metadata(())
            batches = self.kv.batches(request.start_sequence_number)
            try:
                async for batch in batches:
                    await context.write(batch)
            finally:
                await batches.aclose()  # type: ignore[attr-defined]

    async def FlushCache(self, request: common_pb2.FlushCacheRequest, context: Context) -> None:  # noqa: N802
        """Not supported."""
        await self._refuse(context, "FlushCache", "the prefix cache frees its blocks by itself")

    async def StartProfile(self, request: common_pb2.StartProfileRequest, context: Context) -> None:  # noqa: N802
        """Not supported."""
        await self._refuse(context, "StartProfile", "there is no profiler in the server: see icc bench")

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: Context) -> None:  # noqa: N802
        """Not supported."""
        await self._refuse(context, "StopProfile", "there is no profiler in the server: see icc bench")

    async def _refuse(self, context: Context, name: str, why: str) -> None:
        async with self._calls.call(context, name):
            raise HttpError(501, f"{name}: {why}")


@contextlib.contextmanager
def _named_as(request: pb.GenerateRequest | pb.EmbedRequest) -> Iterator[None]:
    """Context in which HttpError 400 gets the names of the gRPC fields."""
    try:
        yield
    except Exception as error:
        found = as_http(error)
        if found.status != 400:
            raise
        raise named_as_asked(found, request) from error


def _within(job: Job, seconds: float | None) -> Job:
    """The job with the caller's deadline, in seconds, if that is earlier than its own; None: unchanged."""
    if seconds is None or (job.deadline is not None and job.deadline <= seconds):
        return job
    submits = [msgspec.structs.replace(submit, deadline=seconds) for submit in job.submits]
    return replace(job, deadline=seconds, submits=submits)
