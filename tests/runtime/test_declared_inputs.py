"""Inputs per token that a program declares and requests give: packing, transport, checks, and separate KV blocks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from icc import SamplingParams
from icc.runtime.batch.declared import DeclaredRows
from icc.runtime.batch.packed import host_arrays
from icc.runtime.batch.scheduled import Draft, ScheduledBatch, ScheduledSequence
from icc.runtime.errors import RequestError
from icc.runtime.format.batch import BatchArray, BatchLimits, declaration_problem
from icc.runtime.format.elements import element_bytes
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeExecutor
from icc.runtime.query import Query
from icc.runtime.requests.extras import isolating_salt
from icc.runtime.requests.request import Standing
from icc.runtime.server.engine.frames import Frames
from icc.runtime.server.engine.messages import Submit, ToEngine, encode

LIMITS = BatchLimits(tokens=12, seqs=4, blocks=5, logit_rows=4)
MARK = BatchArray("mark", ("T",), fill=-1)
AXES = BatchArray("axes", ("T", 3))  # transformers has [3, T]; here rows come first, as in all arrays
STEER = BatchArray("steer", ("T", 4), "f16")
DECLARED = (MARK, AXES, STEER)


def part(number: int, count: int, start: int = 0, **more: Any) -> ScheduledSequence:
    return ScheduledSequence(number, tuple(range(count)), start, ((0,),), 1, **more)


def rows(array: BatchArray, count: int, base: int) -> bytes:
    """The bytes of `count` rows; all numbers of row t are base + t."""
    numbers = np.repeat(base + np.arange(count), array.row_bytes // np.dtype(_numpy(array)).itemsize)
    return numbers.astype(_numpy(array)).tobytes()


def _numpy(array: BatchArray) -> str:
    return {"i32": "i4", "f16": "f2"}[array.dtype]


def packed() -> tuple[DeclaredRows, dict[str, np.ndarray]]:
    arrays = host_arrays(DECLARED, LIMITS)
    return DeclaredRows(DECLARED, arrays), arrays


def seen(arrays: dict[str, np.ndarray], array: BatchArray) -> list[int]:
    """The first number of each row; all numbers of a row must be equal."""
    values = arrays[array.name].view(_numpy(array)).reshape(LIMITS.tokens, -1)
    assert (values == values[:, :1]).all()
    return [int(value) for value in values[:, 0]]


def test_a_chunk_has_the_rows_of_its_positions_and_everybody_else_the_fill() -> None:
    declared, arrays = packed()
    assert seen(arrays, MARK) == [-1] * 12 and seen(arrays, STEER) == [0] * 12
    given = {array.name: rows(array, 6, 10) for array in DECLARED}
    declared.pack(ScheduledBatch((part(1, 2), part(2, 3, 2, extras=given), part(3, 1, 7, extras={}))))
    assert seen(arrays, MARK) == [-1, -1, 12, 13, 14, *[-1] * 7]
    assert seen(arrays, AXES) == seen(arrays, STEER) == [0, 0, 12, 13, 14, *[0] * 7]


def test_what_a_step_leaves_is_not_met_by_the_next() -> None:
    """A long step is followed by shorter ones: tokens without a given row have the fill value."""
    declared, arrays = packed()
    given = {"mark": rows(MARK, 4, 20)}
    declared.pack(ScheduledBatch((part(1, 12, extras={"mark": rows(MARK, 12, 1)}),)))
    assert seen(arrays, MARK) == list(range(1, 13))
    declared.pack(ScheduledBatch((part(2, 3, 2, extras=given), part(3, 1))))
    assert seen(arrays, MARK) == [22, 23, *[-1] * 10]
    declared.pack(ScheduledBatch((part(3, 1), part(2, 1, 3, extras=given))))
    assert seen(arrays, MARK) == [-1, 23, *[-1] * 10]
    declared.pack(ScheduledBatch((part(3, 1),)))
    assert seen(arrays, MARK) == [-1] * 12


def test_guesses_have_the_rows_of_their_positions() -> None:
    declared, arrays = packed()
    tree = Draft((7, 8, 9, 6), (-1, -1, 0, 2))
    declared.pack(ScheduledBatch((part(1, 5, 3, draft=tree, extras={"mark": rows(MARK, 6, 30)}),)))
    assert seen(arrays, MARK)[:6] == [33, 34, 34, 35, -1, -1], "the last is behind all rows"


def test_bits_of_every_type() -> None:
    assert element_bytes(-1.5, "bf16") == b"\xc0\xbf" and element_bytes(1, "f16") == b"\x00\x3c"
    assert BatchArray("x", ("T", 2), "i8", fill=-2).fill_row == b"\xfe\xfe"
    assert BatchArray("x", ("T", 5), "bf16").row_bytes == 10
    for wrong in ({"dtype": "i64"}, {"dtype": "i8", "fill": 300}):
        with pytest.raises(ValueError, match="input x"):
            BatchArray("x", ("T",), **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (BatchArray("positions", ("T",)), "taken"),
        (BatchArray("arena", ("T",)), "taken"),
        (BatchArray("mark", ("T",)), "taken"),
        (BatchArray("a b", ("T",)), "no name"),
        (BatchArray("x", ("S",)), "one row of fixed sizes per token"),
        (BatchArray("x", (3, "T")), "one row of fixed sizes per token"),
        (BatchArray("x", ("T", 0)), "one row of fixed sizes per token"),
        (BatchArray("x", ("T",), gpu=False), "every back end"),
    ],
)
def test_what_cannot_be_declared(array: BatchArray, problem: str) -> None:
    assert problem in declaration_problem((MARK, array)) and not declaration_problem(DECLARED)


@pytest.fixture
def llm(toy_manifest: Callable[..., Any]) -> LLM:
    return LLM(toy_manifest(vocab_size=64, max_seq_len=64), FakeExecutor(inputs=DECLARED))


def test_rows_travel_with_their_request_from_the_first_chunk_to_the_last_token(llm: LLM) -> None:
    extras, greedy = {"mark": rows(MARK, 30, 0)}, SamplingParams(max_tokens=3, temperature=0.0)
    queries = Query(range(20), greedy, extras=extras), Query([1, 2, 3], greedy)
    generations = [generation for query in queries for generation in llm.submit(query).generations]
    while llm.loop.has_work():
        llm.loop.step()
    first = generations[0].request_id
    batches = llm.executor.batches  # type: ignore[attr-defined]
    steps = [s for batch in batches for s in batch.sequences if s.request_id == first]
    assert len(steps) == 4 and all(step.extras == extras for step in steps)
    assert not any(s.extras for batch in batches for s in batch.sequences if s.request_id != first)


@pytest.mark.parametrize(
    ("extras", "said"),
    [
        ({"colour": b""}, "the engine has no input 'colour': it takes mark, axes, steer"),
        ({"axes": bytes(13)}, "input 'axes': 13 bytes are not rows of 12 bytes"),
        ({"mark": bytes(4 * 65)}, "of at most 64 tokens"),
    ],
)
def test_what_the_program_does_not_declare_is_refused(llm: LLM, extras: dict[str, bytes], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        llm.submit(Query([1], extras=extras))
    assert not llm.loop.has_work()


def test_only_requests_of_equal_extras_share_what_is_computed(llm: LLM) -> None:
    prompt, found = list(range(20)), []
    for extras in ({}, {}, {"mark": rows(MARK, 20, 0)}, {"mark": rows(MARK, 20, 1)}, {"mark": rows(MARK, 20, 0)}):
        [generation] = llm.submit(Query(prompt, extras=extras)).generations
        while llm.loop.has_work():
            llm.loop.step()
        found.append(generation.num_cached_tokens)
    assert found == [0, 16, 0, 0, 16]


def test_salts_of_extras_differ() -> None:
    given = [{}, {"a": b""}, {"a": b"x"}, {"a": b"x", "b": b""}, {"b": b"x"}, {"ab": b"x"}, {"a": b"bx"}]
    salts = {isolating_salt(salt, extras) for extras in given for salt in (b"", b"other")}
    assert len(salts) == 2 * len(given)
    assert isolating_salt(b"s", {"a": b"1", "b": b"2"}) == isolating_salt(b"s", {"b": b"2", "a": b"1"})


def test_rows_reach_the_process_of_the_engine() -> None:
    submit = Submit(3, (1, 2), SamplingParams(), 7, "client", b"salt", extras={"mark": rows(MARK, 2, 5)})
    [body] = Frames().feed(encode(submit))
    found = msgspec.msgpack.decode(body, type=ToEngine)
    assert isinstance(found, Submit)
    assert found.standing == Standing(7, "client", b"salt", {"mark": rows(MARK, 2, 5)})


def test_no_product_of_types_and_vocabulary_is_left() -> None:
    """Token types are an input like any other. Only the reader of format 2 knows how that version encoded them."""
    root = Path(__file__).parents[2]
    command = ["grep", "-rn", "--include=*.py", "token_types", "compiler/graph", "compiler/engine", "runtime"]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.splitlines()
    assert [line.split(":")[0] for line in found] == ["runtime/format/version2.py"]
