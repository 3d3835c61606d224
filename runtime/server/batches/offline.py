"""`icc batch`: works off a file of requests without a server; stopped and started again, it goes on."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec
import uvloop

from ...errors import UsageError
from ...options import LoadOptions
from ..api.core import Core
from ..api.keys import ApiKeys
from .batch_lines import Line, LineResult, read_lines, run_line

_SHOW_EVERY = 100  # lines


def run_offline(load: LoadOptions, source: Path, target: Path) -> int:
    """Answer every line of `source` that has no line in `target` yet; the exit code.

    A line is appended as soon as it is answered, in the order in which answers come. UsageError for a file that cannot
    be read or written, or a line that is no request.
    """
    try:
        lines, wrong = read_lines(source.read_bytes())
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}") from error
    if wrong:
        number, text = wrong[0]
        raise UsageError(f"{source}, line {number}: {text}", f"{len(wrong)} lines are wrong" if len(wrong) > 1 else "")
    with _opened(target) as stream:
        done = _answered(stream, target)
        waiting = [line for line in lines if line.custom_id not in done]
        print(f"{len(lines)} requests, {len(lines) - len(waiting)} answered before", file=sys.stderr)
        if waiting:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                failed = runner.run(_run(load, waiting, stream))
            os.fsync(stream.fileno())
            print(f"{len(waiting)} answered now, {failed} of them with an error", file=sys.stderr)
    return 0


def _opened(target: Path) -> BinaryIO:
    try:
        return open(os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b")
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error


def _answered(stream: BinaryIO, target: Path) -> set[str]:
    """The ids in the output file; a last line that was cut off is removed, and the stream stands at the end."""
    content = stream.read()
    whole = content[: content.rfind(b"\n") + 1]
    try:
        found = {msgspec.json.decode(line, type=LineResult).custom_id for line in whole.splitlines()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{target} exists and holds something else", "give another output file") from error
    stream.seek(len(whole))
    stream.truncate()
    return found


async def _run(load: LoadOptions, lines: list[Line], stream: BinaryIO) -> int:
    """The number of lines that ended with an error."""
    core = Core(load, ApiKeys())
    waiting = iter(lines)
    statuses: list[int] = []

    async def work() -> None:
        for line in waiting:  # shared by all workers
            status, result = await run_line(core.jobs, core.generator, "", line)
            stream.write(result + b"\n")
            stream.flush()
            statuses.append(status)
            if len(statuses) % _SHOW_EVERY == 0:
                print(f"{len(statuses)} of {len(lines)}", file=sys.stderr)

    try:
        await core.start()
        async with asyncio.TaskGroup() as group:
            for _ in range(2 * core.max_batch_size):  # so that the batch is full while answers are written
                group.create_task(work())
    finally:
        await core.stop()
    return sum(status != 200 for status in statuses)
