"""Batches: runs stored batches at low priority beside other requests, and resumes them after a restart."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from ..api.generate import Generator
from ..api.jobs import Jobs
from .batch_lines import BatchLine, read_lines, run_line
from .store import Batch, BatchError, BatchErrors, BatchStore

log = logging.getLogger("icc.serve")


class Batches:
    """Runs one batch at a time, and `width` of its lines at a time. A line with a result is never run again."""

    def __init__(self, store: BatchStore, jobs: Jobs, generator: Generator, width: int) -> None:
        self.store = store
        self._jobs, self._generator, self._width = jobs, generator, width
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._current: tuple[str, asyncio.Task[None]] | None = None

    def start(self) -> None:
        """Start with the stored batches that have not ended, in the running event loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop; lines without a result are run again after the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self.store.close)

    def added(self) -> None:
        """Wake up for a new batch."""
        self._wake.set()

    async def cancel(self, batch: Batch) -> Batch:
        """Cancel a batch that has not ended; its running lines are cancelled at once."""
        if batch.status in ("validating", "in_progress"):
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            await asyncio.to_thread(self.store.save_batch, batch)
            if self._current is not None and self._current[0] == batch.id:
                self._current[1].cancel()
            self._wake.set()
        return batch

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            for client, batch in await asyncio.to_thread(self.store.open_batches):
                task = asyncio.create_task(self._advance(client, batch))
                self._current = (batch.id, task)
                try:
                    await task
                except asyncio.CancelledError:
                    if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                        task.cancel()
                        await asyncio.gather(task, return_exceptions=True)
                        raise
                    self._wake.set()  # the batch was cancelled: the next pass finishes it
                except Exception:
                    log.exception("batch %s failed", batch.id)
                    batch.status, batch.failed_at = "failed", int(time.time())
                    await asyncio.to_thread(self.store.save_batch, batch)
                finally:
                    self._current = None
            await self._wake.wait()

    async def _advance(self, client: str, batch: Batch) -> None:
        """Run a batch to its end, from its current status."""
        if batch.status == "validating":
            await self._validate(client, batch)
        if batch.status == "in_progress":
            await self._run_lines(client, batch)
            batch.status, batch.finalizing_at = "finalizing", int(time.time())
        if batch.status in ("finalizing", "cancelling"):
            await asyncio.to_thread(self._finish, client, batch)

    async def _validate(self, client: str, batch: Batch) -> None:
        content = await asyncio.to_thread(self.store.content, client, batch.input_file_id)
        lines, wrong = await asyncio.to_thread(read_lines, content or b"", batch.endpoint)
        now = int(time.time())
        if wrong:
            batch.status, batch.failed_at = "failed", now
            batch.errors = BatchErrors([BatchError("invalid_request", text, line) for line, text in wrong[:100]])
        else:
            await asyncio.to_thread(self.store.add_lines, batch.id, [msgspec.json.encode(line) for line in lines])
            batch.status, batch.in_progress_at = "in_progress", now
        await asyncio.to_thread(self.store.save_batch, batch)

    async def _run_lines(self, client: str, batch: Batch) -> None:
        while pending := await asyncio.to_thread(self.store.pending_lines, batch.id, self._width):
            async with asyncio.TaskGroup() as group:
                for number, request in pending:
                    group.create_task(self._run_one(client, batch.id, number, request))

    async def _run_one(self, client: str, batch_id: str, number: int, request: bytes) -> None:
        line = msgspec.json.decode(request, type=BatchLine)
        status, result = await run_line(self._jobs, self._generator, client, line)
        await asyncio.to_thread(self.store.save_result, batch_id, number, status, result)

    def _finish(self, client: str, batch: Batch) -> None:
        for succeeded in (True, False):
            content = self.store.results(batch.id, succeeded)
            if content:
                kind = "output" if succeeded else "error"
                found = self.store.add_file(client, f"{batch.id}_{kind}.jsonl", "batch_output", content)
                setattr(batch, f"{kind}_file_id", found.id)
        now = int(time.time())
        if batch.status == "cancelling":
            batch.status, batch.cancelled_at = "cancelled", now
        else:
            batch.status, batch.completed_at = "completed", now
        self.store.save_batch(batch)
