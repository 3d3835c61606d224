"""`icc batch`: answers a file of requests without a server; an interrupted run can be resumed."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import msgspec

from ...errors import BatchFailed, UsageError
from ...options import LoadOptions
from ...progress.stream import open_display
from ..api.core import Core
from ..api.judging import EngineJudge
from ..api.keys import ApiKeys
from .batch_lines import BatchLine, LineResult, read_lines, run_line

Done = Callable[[BatchLine, int, bytes], None]


def run_offline(
    load: LoadOptions,
    source: Path,
    target: Path,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    judge: Path | None = None,
) -> None:
    """Answer every line of `source` that has no result in `target` yet, with an engine on this machine; see
    `answer_file`. adapters: paths of the adapters that lines may name, by name. judge: an engine that chooses the best
    of several answers; None: the likeliest are the best."""

    def answer(lines: list[BatchLine], done: Done) -> None:
        core = Core(load, ApiKeys(), adapters=adapters)
        core.generator.judge = None if judge is None else EngineJudge(judge, load)
        asyncio.run(_run(core, lines, done))

    answer_file(source, target, answer)


def answer_file(source: Path, target: Path, answer: Callable[[list[BatchLine], Done], None]) -> None:
    """Have every line of `source` answered that has no result in `target` yet.

    answer: called with those lines and a function `done`, which it calls with each line, its status and its result.
    Results are appended to `target` at once, in the order of those calls. UsageError for a file that cannot be read or
    written, or a line that is no request; BatchFailed if a request got an error, in this run or an earlier one.
    """
    try:
        lines, wrong = read_lines(source.read_bytes())
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}") from error
    if wrong:
        number, text = wrong[0]
        raise UsageError(f"{source}, line {number}: {text}", f"{len(wrong)} lines are wrong" if len(wrong) > 1 else "")
    with _opened(target) as stream:
        statuses = _answered(stream, target)
        waiting = [line for line in lines if line.custom_id not in statuses]
        print(f"{len(lines)} requests, {len(lines) - len(waiting)} answered before", file=sys.stderr)
        if waiting:
            with open_display() as display, display.stage("batch") as progress:
                done = 0

                def append(line: BatchLine, status: int, result: bytes) -> None:
                    nonlocal done
                    statuses[line.custom_id] = status
                    stream.write(result + b"\n")
                    stream.flush()
                    done += 1
                    progress(line.custom_id, done, len(waiting))

                answer(waiting, append)
            os.fsync(stream.fileno())
            print(f"{len(waiting)} answered now", file=sys.stderr)
    failed = sum(statuses[line.custom_id] != 200 for line in lines)
    if failed:
        raise BatchFailed(failed, len(lines), str(target))


def _opened(target: Path) -> BinaryIO:
    try:
        if target.exists() and not target.is_file():  # earlier results cannot be read from a device or a pipe
            raise UsageError(f"{target} is no file", "give another output file")
        return open(os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b")
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error


def _answered(stream: BinaryIO, target: Path) -> dict[str, int]:
    """The statuses in the output file by id. Removes an incomplete last line, and leaves the stream at the end."""
    content = stream.read()
    whole = content[: content.rfind(b"\n") + 1]
    try:
        results = [msgspec.json.decode(line, type=LineResult) for line in whole.splitlines()]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{target} exists and holds something else", "give another output file") from error
    stream.seek(len(whole))
    stream.truncate()
    return {result.custom_id: result.response.status_code for result in results}


async def _run(core: Core, lines: list[BatchLine], done: Done) -> None:
    """Answer the lines."""
    waiting = iter(lines)

    async def work() -> None:
        for line in waiting:  # shared by all workers
            done(line, *await run_line(core.jobs, core.generator, "", line))

    try:
        await core.start()
        async with asyncio.TaskGroup() as group:
            for _ in range(2 * core.max_batch_size):  # keeps the batch full while answers are written
                group.create_task(work())
    finally:
        await core.stop()
