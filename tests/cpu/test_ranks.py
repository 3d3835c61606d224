"""Collectives of ranks, as threads of one process: sums in the order of ranks, concatenated lines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from cpu_harness import Batch, Builder
from icc.compiler.backends.cpu.build import build_libraries
from icc.compiler.backends.cpu.isa import host_isas
from icc.compiler.ops.body import Body
from icc.compiler.program.steps.collective import AllGather, AllReduce, GatherRows, ReduceScatter, Transfer
from icc.compiler.program.steps.pointwise import Pointwise
from icc.runtime.executor.cpu.device import arrays_of
from icc.runtime.executor.cpu.library import IccBatch, KernelLibrary
from icc.runtime.executor.cpu.rank_memory import RankMemory
from icc.runtime.format.batch import BatchLimits
from icc.runtime.format.operands import OutputOperand
from icc.runtime.requests.sampler import largest_of

WIDE, LINES, N, RANKS, WORDS = 1001, 3, 37, 3, 701  # WORDS: per rank
TOKENS = 300  # with WIDE elements: more than a slot holds


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Builder, bytes]:
    made = Builder(vocab=RANKS * WORDS)
    x, y = made.buffer("x", [WIDE]), made.buffer("y", [WIDE])
    made.step(AllReduce(x=x, y=y, n=WIDE))
    z, joined = made.buffer("z", [LINES, N]), made.buffer("joined", [LINES, RANKS, N])
    made.step(AllGather(x=z, y=joined, n=N, outer=LINES, ranks=RANKS))
    again = made.buffer("again", [WIDE])
    made.step(AllReduce(x=y, y=again, n=WIDE))
    head = made.buffer("head", [WORDS], rows="logit_rows")
    logits = OutputOperand("logits", "f32", RANKS * WORDS)
    made.step(AllGather(rows="logit_rows", x=head, y=logits, n=WORDS, outer=1, ranks=RANKS))
    folder = tmp_path_factory.mktemp("ranks") / "kernels"
    [library] = build_libraries(made.program(), folder, host_isas()[:1], optimize="-O1")
    return made, (folder.parent / library.path).read_bytes()


class Rank:
    """A handle of the library with memory of its own."""

    def __init__(
        self, made: Builder, image: bytes, rank: int, threads: int, memory: RankMemory, most: int = TOKENS
    ) -> None:
        self.program = made.program()
        self.arena = np.zeros(self.program.arena_bytes_per_token * most + 64, np.uint8)
        self.kv = np.full(4096, 255, np.uint8)
        self.library = KernelLibrary(image, "ranks")
        self.handle = self.library.create(threads, [], self.arena.ctypes.data, self.kv.ctypes.data, [1])
        self.library.join_ranks(self.handle, rank, memory.count, threads, memory)

    def view(self, name: str, tokens: int) -> np.ndarray:
        buffer = self.program.buffer(name)
        start, size = buffer.offset * tokens, int(np.prod(buffer.shape)) * tokens * 4
        return self.arena[start : start + size].view(np.float32).reshape(tokens, *buffer.shape)


def batch_of(tokens: int, rows: int = 1) -> tuple[IccBatch, list[np.ndarray]]:
    """A step and its arrays; the last one is the logits."""
    arrays = Batch([(0, tokens, [0] * 32)], logit_rows=np.arange(rows)).arrays()
    addresses = {name: array.ctypes.data for name, array in arrays.items() if name != "parents"}
    logits = np.zeros((rows, RANKS * WORDS), np.float32)
    raw = IccBatch(
        num_tokens=tokens, num_seqs=1, num_logit_rows=rows, max_blocks=32, logits=logits.ctypes.data, **addresses
    )
    return raw, [*arrays.values(), logits]


@contextmanager
def following(built: tuple[Builder, bytes], threads: int) -> Iterator[tuple[list[Rank], RankMemory]]:
    """The ranks and their shared memory; all ranks except the first follow it."""
    made, image = built
    memory = RankMemory(RANKS, arrays_of(made.program()), BatchLimits(TOKENS, 1, 32, 1, 1))
    ranks = [Rank(made, image, rank, threads, memory) for rank in range(RANKS)]
    ended: list[int] = []
    followed = [batch_of(1, TOKENS) for _ in ranks[1:]]
    followers = [
        threading.Thread(target=lambda r=r, b=b: ended.append(r.library.follow(r.handle, (IccBatch * 1)(b[0]))))  # type: ignore[misc]
        for r, b in zip(ranks[1:], followed, strict=True)
    ]
    for thread in followers:
        thread.start()
    yield ranks, memory
    ranks[0].library.end_ranks(ranks[0].handle)
    for thread in followers:
        thread.join(10)
    assert ended == [0] * (RANKS - 1)
    for rank in ranks:
        rank.library.destroy(rank.handle)


@pytest.mark.parametrize("threads", [1, 2])
def test_ranks_add_up_and_gather(threads: int, built: tuple[Builder, bytes]) -> None:
    with following(built, threads) as (ranks, _):
        add_up_and_gather(ranks, threads)


def add_up_and_gather(ranks: list[Rank], threads: int) -> None:
    rng = np.random.default_rng(threads)
    for tokens in (1, 5, TOKENS, 2, 64):
        for rank in ranks:
            for name in ("x", "z"):
                rank.view(name, tokens)[...] = rng.standard_normal(rank.view(name, tokens).shape, np.float32)
        given, kept = batch_of(tokens)
        ranks[0].library.step(ranks[0].handle, (IccBatch * 1)(given))
        total = ranks[0].view("x", tokens).copy()
        for rank in ranks[1:]:
            total += rank.view("x", tokens)
        joined = np.stack([rank.view("z", tokens) for rank in ranks], axis=2)
        for rank in ranks:
            assert np.array_equal(rank.view("y", tokens), total)
            assert np.array_equal(rank.view("joined", tokens), joined)
            assert np.array_equal(rank.view("again", tokens), total + total + total)
        del kept
    ranks[0].library.zero_on_ranks(ranks[0].handle, 16, 32)
    assert all(not rank.kv[16:48].any() and rank.kv[15] == rank.kv[48] == 255 for rank in ranks)


def words(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Logits [RANKS, rows, WORDS], many of them equal, some of them zeros of either sign or minus infinity."""
    found = rng.integers(-9, 10, (RANKS, rows, WORDS)).astype(np.float32) / 4
    found[rng.random(found.shape) < 0.2] *= -0.0
    found[rng.random(found.shape) < 0.01] = -np.inf
    if rows > 1:
        found[:, 1] = np.minimum(found[:, 1], 0)  # most of the largest are zeros
        found[1, 1, :600] = -np.inf
    return found


def run_words(ranks: list[Rank], logits: np.ndarray, wanted: int) -> tuple[np.ndarray, int]:
    """The logits [rows, RANKS * WORDS] of a step over the ranks' own `logits`, and the bytes that rank 0 sent for
    them."""
    rows = logits.shape[1]
    for rank, own in zip(ranks, logits, strict=True):
        rank.view("head", rows)[...] = own
    library, handle = ranks[0].library, ranks[0].handle
    library.want_of_ranks(handle, wanted)
    before = library.given_to_ranks(handle)
    given, kept = batch_of(rows, rows)
    library.step(handle, (IccBatch * 1)(given))
    return kept[-1], library.given_to_ranks(handle) - before - sum_bytes(rows)


def sum_bytes(tokens: int) -> int:
    """The bytes that a rank sends in the program's other steps."""
    return tokens * 4 * (WIDE + LINES * N + WIDE)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_largest_of_a_row_travel_alone(threads: int, built: tuple[Builder, bytes]) -> None:
    """The largest logits are those of the whole row, the first of equal ones; each takes 8 bytes per thread, instead of
    4 bytes per word."""
    rng = np.random.default_rng(threads)
    with following(built, threads) as (ranks, _):
        for wanted in (1, 5, 40, 128):
            for rows in (1, 7, TOKENS):
                logits = words(rng, rows)
                found, nbytes = run_words(ranks, logits, wanted)
                assert nbytes == 8 * rows * threads * wanted
                for row, whole in zip(found, logits.swapaxes(0, 1).reshape(rows, -1), strict=True):
                    largest = largest_of(whole, wanted)
                    assert np.array_equal(row[largest], whole[largest])
                    assert np.array_equal(
                        largest_of(row, wanted)[whole[largest] > -np.inf], largest[whole[largest] > -np.inf]
                    )
                    others = row > -np.inf
                    assert np.array_equal(row[others], whole[others])
                    assert others.sum() <= RANKS * threads * wanted
        logits = words(rng, 3)
        logits[1, 0, 5], logits[2, 1, 6], logits[0, 2, 7] = np.nan, -np.nan, np.inf
        found, _ = run_words(ranks, logits, 5)
        assert ranks[0].library.largest(found.ctypes.data, 3, RANKS * WORDS) == [-1, -1, -1]
        assert np.isnan(found[0]).any() and np.isnan(found[1]).any() and np.isinf(found[2].max())
        whole, nbytes = run_words(ranks, words(rng, 3), 0)
        assert nbytes == 4 * 3 * WORDS and np.isfinite(whole).any()


def test_ranks_are_written_to(built: tuple[Builder, bytes]) -> None:
    """Rank 0 writes to all other ranks, or to one of them, and not to its own memory."""
    with following(built, 1) as (ranks, memory):
        memory.stage(bytes(range(100)))
        ranks[0].library.write_on_ranks(ranks[0].handle, -1, 8, 100)
        memory.stage(b"abc")
        ranks[0].library.write_on_ranks(ranks[0].handle, -1, 10, 3, only=2)
        assert not ranks[0].arena[:200].any()
        assert bytes(ranks[1].arena[:110]) == bytes(8) + bytes(range(100)) + bytes(2)
        assert bytes(ranks[2].arena[8:15]) == b"\0\x01abc\x05\x06"


def test_nobody_waits_for_a_rank_that_is_gone(built: tuple[Builder, bytes], tmp_path: Path) -> None:
    """Rank 0 of three; the others never start. Its step fails once the memory is stopped."""
    made, image = built
    memory = RankMemory(RANKS, arrays_of(made.program()), BatchLimits(TOKENS, 1, 32, 1, 1))
    rank = Rank(made, image, 0, 1, memory)
    given, kept = batch_of(3)
    threading.Timer(0.2, memory.stop).start()
    with pytest.raises(Exception, match="a step failed in the kernel library with code 2"):
        rank.library.step(rank.handle, (IccBatch * 1)(given))
    rank.library.destroy(rank.handle)
    assert kept


WIDER, MOST = 3 * WIDE, 450  # elements, tokens: six chunks of a slot, so that the sender must wait for the receiver


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Builder, bytes]:
    made = Builder()
    made.vocab = WIDER
    x, a, b = (made.buffer(name, [WIDER]) for name in "xab")
    made.step(Transfer(x=x, y=a, n=WIDER, stage=1))
    made.step(Transfer(x=a, y=b, n=WIDER, stage=2))
    double = Body.parse("t0 = add a0 a0")
    walks = ((1,), (1,))
    made.step(Pointwise(args=(b,), y=OutputOperand("logits", "f32", WIDER), body=double, shape=(WIDER,), walks=walks))
    folder = tmp_path_factory.mktemp("stages")
    [library] = build_libraries(made.program(), folder / "kernels", host_isas()[:1], optimize="-O1")
    return made, (folder / library.path).read_bytes()


@pytest.mark.parametrize("threads", [1, 2])
def test_stages_pass_on_what_they_have(threads: int, staged: tuple[Builder, bytes]) -> None:
    """x goes through three ranks, each of which runs its own steps alone; the last one writes the logits."""
    made, image = staged
    memory = RankMemory(RANKS, arrays_of(made.program()), BatchLimits(MOST, 1, 32, 1, 1))
    ranks = [Rank(made, image, rank, threads, memory, MOST) for rank in range(RANKS)]
    batches = [batch_of(1) for _ in ranks]
    logits = np.zeros((MOST, WIDER), np.float32)
    for raw, _ in batches:
        raw.logits = logits.ctypes.data
    ended: list[int] = []
    followers = [
        threading.Thread(target=lambda r=r, b=b: ended.append(r.library.follow(r.handle, (IccBatch * 1)(b[0]))))  # type: ignore[misc]
        for r, b in zip(ranks[1:], batches[1:], strict=True)
    ]
    for thread in followers:
        thread.start()
    rng = np.random.default_rng(threads)
    for tokens in (1, MOST, 3, 300):
        given, kept = batch_of(tokens)
        given.logits = logits.ctypes.data
        for rank in ranks:
            for name in "xab":
                rank.view(name, tokens)[...] = -7.0
        value = rng.standard_normal((tokens, WIDER), np.float32)
        ranks[0].view("x", tokens)[...] = value
        ranks[0].library.step(ranks[0].handle, (IccBatch * 1)(given))
        assert np.array_equal(logits[:tokens], value + value)
        assert (ranks[0].view("a", tokens) == -7).all() and (ranks[1].view("b", tokens) == -7).all()
        assert np.array_equal(ranks[1].view("a", tokens), value) and np.array_equal(ranks[2].view("b", tokens), value)
        del kept
    ranks[0].library.end_ranks(ranks[0].handle)
    for thread in followers:
        thread.join(10)
    assert ended == [0] * (RANKS - 1)
    for rank in ranks:
        rank.library.destroy(rank.handle)


LEAST = 3  # fewer rows are not divided


@pytest.fixture(scope="module")
def rowwise(tmp_path_factory: pytest.TempPathFactory) -> tuple[Builder, bytes]:
    """A reduce-scatter of rows, a step of each rank on its own rows, and a gather of the rows."""
    made = Builder(vocab=RANKS * WORDS)
    x, y, z = (made.buffer(name, [WIDE]) for name in "xyz")
    made.step(ReduceScatter(x=x, y=y, n=WIDE, ranks=RANKS, least=LEAST))
    twice = Body.parse("t0 = add a0 a0")
    made.step(Pointwise(args=(y,), y=z, body=twice, shape=(WIDE,), walks=((1,), (1,))))
    made.step(GatherRows(x=z, y=z, n=WIDE, ranks=RANKS, least=LEAST))
    head = made.buffer("head", [WORDS], rows="logit_rows")
    logits = OutputOperand("logits", "f32", RANKS * WORDS)
    made.step(AllGather(rows="logit_rows", x=head, y=logits, n=WORDS, outer=1, ranks=RANKS))
    folder = tmp_path_factory.mktemp("rows") / "kernels"
    [library] = build_libraries(made.program(), folder, host_isas()[:1], optimize="-O1")
    return made, (folder.parent / library.path).read_bytes()


@pytest.mark.parametrize("threads", [1, 2])
def test_ranks_have_rows_of_their_own(threads: int, rowwise: tuple[Builder, bytes]) -> None:
    """Before the gather, each rank writes only its own rows, however many there are; fewer than LEAST rows are all
    written."""
    rng = np.random.default_rng(threads)
    with following(rowwise, threads) as (ranks, _):
        for tokens in (1, 2, 3, 5, TOKENS, 64):
            for rank in ranks:
                rank.view("x", tokens)[...] = rng.standard_normal((tokens, WIDE), np.float32)
                rank.view("y", tokens)[...] = 7
            given, kept = batch_of(tokens)
            ranks[0].library.step(ranks[0].handle, (IccBatch * 1)(given))
            total = ranks[0].view("x", tokens).copy()
            for rank in ranks[1:]:
                total += rank.view("x", tokens)
            for number, rank in enumerate(ranks):
                own = slice(0, tokens)
                if tokens >= LEAST:
                    own = slice(tokens * number // RANKS, tokens * (number + 1) // RANKS)
                expected = np.full_like(total, 7)
                expected[own] = total[own]
                assert np.array_equal(rank.view("y", tokens), expected)
                assert np.array_equal(rank.view("z", tokens), total + total)
            del kept
