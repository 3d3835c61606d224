"""`icc inspect --memory`: what it states is what an engine takes that is filled to the stated limit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import pytest
from click.testing import CliRunner
from icc.compiler.cli import main
from icc.runtime.executor.cpu import memory

LENGTH, WINDOW, STEP, BATCH = 256, 40, 512, 32


@pytest.fixture(scope="module")
def engine(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer that sees all for five with a window, as Gemma 3 has them, with a wide cache."""
    import transformers

    wide = {**tiny.BASE, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": WINDOW}
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = transformers.Gemma3TextConfig(
        **{**wide, "max_position_embeddings": 32768, "num_hidden_layers": 6}, layer_types=kinds
    )
    path = tmp_path_factory.mktemp("model") / "model"
    tiny.save_tiny(config, path)
    limits = {"max_seq_len": LENGTH, "max_step_tokens": STEP, "max_batch_size": BATCH}
    return icc.compile(path, path.with_name("engine"), target="native", **limits)


def stated(engine: Path, *options: object) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["inspect", str(engine), "--memory", "--json", *map(str, options)])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def takes(engine: Path, sequences: int, length: int) -> int:
    """The bytes of a process that has filled the engine so."""
    filled = [sys.executable, Path(__file__).with_name("filled.py"), engine, str(sequences), str(length)]
    return int(subprocess.run(filled, capture_output=True, check=True, text=True).stdout)


@pytest.mark.soak
@pytest.mark.parametrize(("sequences", "length"), [(BATCH, LENGTH), (5, 100)])
def test_a_filled_cache_takes_what_is_stated(engine: Path, sequences: int, length: int) -> None:
    facts = stated(engine, "--sequences", sequences, "--length", length)
    assert takes(engine, sequences, length) == pytest.approx(facts["total_bytes"], rel=0.02)


def test_a_filled_engine_takes_what_is_stated(compiled: Callable[..., Any]) -> None:
    """An engine with states, that other tests compile too."""
    engine = compiled("qwen3_next-delta_rule", max_step_tokens=48, max_batch_size=4).engine
    facts = stated(engine)
    assert (facts["sequences"], facts["length"]) == (4, 256)
    assert takes(engine, 4, 256) == pytest.approx(facts["total_bytes"], rel=0.02)
    paged, states = facts["kv_cache"]
    assert (
        states["states"] + states["checkpoints"] == 4 * (2 + 2) + 2
        and paged["bytes"] == paged["blocks"] * paged["block_bytes"]
    )
    with icc.load(engine) as llm:
        cache = llm.executor.device.cache
        assert paged["bytes"] + states["states_bytes"] + states["checkpoints_bytes"] == cache.nbytes
    for options, words in ((("--memory", "--sequences", "5"), "1 to 4"), (("--length", "9"), "add --memory")):
        refused = CliRunner().invoke(main, ["inspect", str(engine), *options])
        assert refused.exit_code == 2 and words in refused.output


def test_touched_memory_is_counted_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 1 << 20
    monkeypatch.setattr(memory, "read_text", lambda file: "always [madvise] never")
    assert memory.touched_bytes([(0, 1), (mib, 1), (3 * mib, 2 * mib)], 5 * mib) == 5 * mib
    assert memory.touched_bytes([(0, 1), (4 * mib, 1)], 5 * mib) == 2 * mib + 4096
    monkeypatch.setattr(memory, "read_text", lambda file: "always madvise [never]")
    assert memory.touched_bytes([(0, 1), (4095, 2), (5 * mib - 1, 1)], 5 * mib) == 3 * 4096
    assert memory.touched_bytes([(5, 0)], mib) == 0
