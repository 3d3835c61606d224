"""Ranks beyond generation: vectors, blocks for compiled prompts, and the bytes that `icc inspect --memory` counts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
from click.testing import CliRunner
from icc.compiler.cli import main
from icc.runtime.commands.memory import certify
from icc.runtime.errors import DeviceError, UsageError
from icc.runtime.executor import rank_processes
from icc.runtime.executor.open import Resources, open_executor
from icc.runtime.format.load import open_engine, read_manifest
from icc.runtime.kv.sequence import CachedSequence
from icc.runtime.llm import LLM
from icc.runtime.loading import open_llm
from icc.runtime.options import LoadOptions
from icc.runtime.prefixes.blocks import KVBlocks, digest_of, in_reach
from sizes import soak

Compiled = Callable[..., Any]
TENSORS, STAGES = {"tensor_parallel": 2}, {"pipeline_parallel": 2}


@pytest.mark.parametrize("ranks", [TENSORS, *soak(STAGES, {**TENSORS, **STAGES})])
def test_ranks_embed_as_one(ranks: dict[str, int], compiled: Compiled) -> None:
    """--task embed: texts of one token and of several steps; stages of whole layers change no bit."""
    texts = [[1, 5, 9], [3], [11, 12] * 20]
    found: list[np.ndarray] = []
    for more in ({}, ranks):
        engine = compiled("llama", max_seq_len=64, max_step_tokens=24, task="embed", pooling="mean", **more).engine
        with icc.load(engine, threads=2) as llm:
            found.append(llm.embed(texts))
    assert np.abs(found[1] - found[0]).max() <= (0 if ranks == STAGES else 1e-5)


def test_compiled_prompts_have_blocks_of_their_own(compiled: Compiled) -> None:
    """Compiled prompts get blocks in addition to those of the KV cache, on all ranks."""
    engine = open_engine(compiled("llama", max_seq_len=64, tensor_parallel=2).engine)
    found: list[int] = []
    for more in ((), (3,)):
        executor = open_executor(engine, resources=Resources(kv_bytes=1 << 20, more_blocks=more))
        found.append(executor.groups[0].num_blocks)
        executor.close()
    engine.close()
    assert found[1] == found[0] + 3


@pytest.mark.parametrize("options", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_inspect_counts_the_memory_of_all_ranks(options: dict[str, int], compiled: Compiled) -> None:
    """Weights are the sum of all files; each stage has the cache of its own layers."""
    facts = [
        certify(compiled("llama", max_seq_len=64, **more).engine, sequences=2, length=40) for more in ({}, options)
    ]
    engine = compiled("llama", max_seq_len=64, **options).engine
    stored = 0
    for entry in read_manifest(engine).programs.values():
        with (engine / entry.weights).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        ends = [one["data_offsets"] for name, one in header.items() if name != "__metadata__"]
        stored += sum(end - begin for begin, end in ends)
    assert facts[1]["ranks"] == 2 and facts[1]["weights_bytes"] == stored
    assert facts[1]["process_bytes"] > 1.5 * facts[0]["process_bytes"]  # type: ignore[operator]
    assert facts[1]["total_bytes"] > facts[0]["total_bytes"]  # type: ignore[operator]


def test_doctor_expects_what_ranks_reach_together(compiled: Compiled) -> None:
    """Ranks read parts of the weights and caches from one memory: together about as many bytes as one rank."""
    one, two = (
        CliRunner().invoke(main, ["doctor", str(compiled("llama", max_seq_len=64, **more).engine), "--json"])
        for more in ({}, TENSORS)
    )
    alone, both = (json.loads(done.stdout) for done in (one, two))
    for name in ("kv_bytes", "kv_bytes_per_token", "kv_tokens"):
        assert both["expect"][name] == alone["expect"][name], name
    ratio = both["expect"]["decode_bytes_per_step"] / alone["expect"]["decode_bytes_per_step"]
    assert 1 <= ratio < 1.3


PROMPT = [i * i % 113 + 3 for i in range(50)]
GREEDY = icc.SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)


def answer(llm: LLM) -> tuple[int, ...]:
    return tuple(llm.generate([PROMPT], GREEDY)[0].token_ids)


def rank_of(llm: LLM) -> int:
    """The process id of rank 1."""
    [pid] = llm.executor.device.group.pids  # type: ignore[attr-defined]
    return pid


def test_what_ranks_keep_goes_to_disk_and_back(compiled: Compiled) -> None:
    """Saved blocks have the parts of all ranks, one after the other; another process continues from them."""
    options = LoadOptions(compiled("llama", max_seq_len=64, tensor_parallel=2).engine, threads=2)
    with open_llm(options) as llm:
        assert in_reach(llm.executor) is None
        wanted = answer(llm)
    with open_llm(options, shares_cache=True) as llm:
        assert answer(llm) == wanted
        kv, blocks = llm.loop.scheduler.kv, blocks_of(llm)
        length = len(PROMPT) // kv.multiple * kv.multiple
        found = kv.found(CachedSequence(tokens=PROMPT[:length]), length)
        assert found is not None
        content, numbers = b"".join(blocks.read(found)), [sorted(held) for held in found]
    changed = bytearray(content)
    changed[-blocks.sizes[0] // 4 :] = bytes(blocks.sizes[0] // 4)  # rank 1's part of the last layer
    for given in (content, changed):
        with open_llm(options, shares_cache=True) as llm:
            blocks = blocks_of(llm)
            assert blocks.nbytes(numbers) == len(content)
            sequence = CachedSequence(tokens=PROMPT[:length])
            assert blocks.adopt(llm.loop.scheduler.kv, sequence, length, numbers, memoryview(given))
            assert (answer(llm) == wanted) == (given is content)


def blocks_of(llm: LLM) -> KVBlocks:
    executor = in_reach(llm.executor)
    assert executor is not None
    return KVBlocks(digest_of(llm.manifest), executor)


def test_the_thread_that_loads_may_end(compiled: Compiled) -> None:
    """Ranks end with the process, not with the thread that started them."""
    engine, found = compiled("llama", max_seq_len=64, tensor_parallel=2).engine, list[LLM]()
    loader = threading.Thread(target=lambda: found.append(icc.load(engine, threads=2)))
    loader.start()
    loader.join()
    with closing(found[0]) as llm:
        assert len(answer(llm)) == 10 and Path(f"/proc/{rank_of(llm)}").exists()


def test_a_rank_ends_quietly_where_rank_0_has_gone() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    with theirs:
        command = [sys.executable, "-P", "-m", "icc.runtime.executor.cpu.rank_main", str(theirs.fileno())]
        done = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_fork_leaves_the_ranks_alone(compiled: Compiled) -> None:
    """Requests of the fork are refused, and its `close` leaves the engine open in the process that loaded it."""
    with icc.load(compiled("llama", max_seq_len=64, tensor_parallel=2).engine, threads=2) as llm:
        wanted = answer(llm)
        if (child := os.fork()) == 0:
            try:
                llm.generate([PROMPT], GREEDY)
            except DeviceError:
                llm.close()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert answer(llm) == wanted


def test_a_rank_that_is_stopped(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped rank may continue; if it does not, requests fail, and closing the engine does not wait for it."""
    monkeypatch.setattr(rank_processes, "HALTED_S", 2)
    monkeypatch.setattr(rank_processes, "_END_S", 0.5)
    engine = compiled("llama", max_seq_len=64, tensor_parallel=2).engine
    with icc.load(engine, threads=2) as llm:
        pid = rank_of(llm)
        wanted = answer(llm)
        os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGCONT)
        assert answer(llm) == wanted
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DeviceError, match="rank 1 is stopped, for 2 s by now: its part of the model is gone"):
            answer(llm)
    assert not Path(f"/proc/{pid}").exists()
    monkeypatch.setattr(rank_processes, "HALTED_S", 60)
    llm = icc.load(engine, threads=2)
    pid = rank_of(llm)
    os.kill(pid, signal.SIGSTOP)
    llm.close()
    assert not Path(f"/proc/{pid}").exists()


def test_ranks_share_fewer_cores(compiled: Compiled) -> None:
    """All ranks use the given cores only; a core that the process may not use is refused."""
    engine, core = compiled("llama", max_seq_len=64, tensor_parallel=2).engine, min(os.sched_getaffinity(0))
    with icc.load(engine, cores=str(core)) as llm:
        assert len(answer(llm)) == 10 and os.sched_getaffinity(0) == {core}
        threads = Path(f"/proc/{rank_of(llm)}/task").iterdir()
        assert all(os.sched_getaffinity(int(thread.name)) == {core} for thread in threads)
    assert os.sched_getaffinity(0) != {core} or len(os.sched_getaffinity(0)) == 1
    with pytest.raises(UsageError, match="may not use core 60000"):
        icc.load(engine, cores="60000")
