"""What goes with ranks besides tokens: vectors, room for compiled prompts, and what `icc inspect --memory` counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import icc
import numpy as np
import pytest
from click.testing import CliRunner
from icc.compiler.cli import main
from icc.runtime.commands.memory import certify
from icc.runtime.executor.open import Resources, open_executor
from icc.runtime.format.load import open_engine, read_manifest
from sizes import soak

Compiled = Callable[..., Any]
TENSORS, STAGES = {"tensor_parallel": 2}, {"pipeline_parallel": 2}


@pytest.mark.parametrize("ranks", [TENSORS, *soak(STAGES, {**TENSORS, **STAGES})])
def test_ranks_embed_as_one(ranks: dict[str, int], compiled: Compiled) -> None:
    """--task embed: texts of one token and of several steps; whole layers change no bit."""
    texts = [[1, 5, 9], [3], [11, 12] * 20]
    found: list[np.ndarray] = []
    for more in ({}, ranks):
        engine = compiled("llama", max_seq_len=64, max_step_tokens=24, task="embed", pooling="mean", **more).engine
        with icc.load(engine, threads=2) as llm:
            found.append(llm.embed(texts))
    assert np.abs(found[1] - found[0]).max() <= (0 if ranks == STAGES else 1e-5)


def test_compiled_prompts_have_blocks_of_their_own(compiled: Compiled) -> None:
    """Beside those of the KV cache, on all ranks."""
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
    """Weights are those of all files; of stages each has the cache of its own layers."""
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
    """They read parts of the weights and caches from one memory: together about what one rank reads."""
    one, two = (
        CliRunner().invoke(main, ["doctor", str(compiled("llama", max_seq_len=64, **more).engine), "--json"])
        for more in ({}, TENSORS)
    )
    alone, both = (json.loads(done.stdout) for done in (one, two))
    for name in ("kv_bytes", "kv_bytes_per_token", "kv_tokens"):
        assert both["expect"][name] == alone["expect"][name], name
    ratio = both["expect"]["decode_bytes_per_step"] / alone["expect"]["decode_bytes_per_step"]
    assert 1 <= ratio < 1.3
