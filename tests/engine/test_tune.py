"""--tune: candidates are other blocks of the same level, the fastest is kept if it gains enough, tokens do not
change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import icc
import pytest
from icc.compiler.backends.cpu.isa import ALL, AVX2, AVX512VNNI, Block, Isa
from icc.compiler.errors import UsageError
from icc.compiler.measure import cpu_tune as tune


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Path:
    path = tmp_path_factory.mktemp("model") / "llama"
    tiny.save_tiny(tiny.tiny_configs()["llama"], path, dtype="float32")
    return path


@pytest.mark.parametrize("isa", ALL, ids=lambda isa: isa.name)
def test_a_variant_has_the_same_rows_and_not_too_many_accumulators(isa: Isa) -> None:
    for tiles, ahead in tune.VARIANTS:
        other = tune.variant(isa, tiles, ahead)
        for kind in ("dense_blocks", "quant_blocks"):
            pairs = list(zip(getattr(isa, kind), getattr(other, kind), strict=True))
            assert all(new.rows == old.rows and new.ahead == ahead for old, new in pairs)
            assert all(new.tiles in (tiles, old.tiles) and new.rows * new.tiles <= 32 for old, new in pairs)


def test_each_row_count_keeps_its_fastest_candidate_where_that_is_worth_it() -> None:
    candidates = [AVX2, tune.variant(AVX2, 1, 256), tune.variant(AVX2, 2, 2048)]
    times = {1: [1.0, 0.5, 0.9], 2: [1.0, 0.99, 0.98], 4: [1.0, 1.2, 0.8]}  # 3, 6, 8 rows were not timed
    chosen = tune.choose(AVX2, candidates, times)
    assert chosen.quant_blocks == (Block(1, 1, 256), *AVX2.quant_blocks[1:3], Block(4, 2, 2048), *AVX2.quant_blocks[4:])
    assert chosen.dense_blocks == (Block(1, 1, 256), AVX2.dense_blocks[1], Block(4, 2, 2048), AVX2.dense_blocks[3])


def test_a_tuned_engine_says_what_it_chose_and_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path
) -> None:
    """The clock is replaced: every row count finds the last candidate fastest."""
    monkeypatch.setattr(tune, "VARIANTS", ((1, 2048),))
    monkeypatch.setattr(tune, "_least", lambda executors, rows, limits: [3.0, 2.0][: len(executors)])
    ids, logits = [5, 9, 2, 40, 7], []
    for name, options in (("plain", {}), ("tuned", {"tune": True})):
        engine = icc.compile(tiny_llama, tmp_path / name, target="native", quant="rtn4", max_seq_len=64, **options)
        with icc.load(engine, threads=2) as llm:
            logits.append(llm.logits(ids).tobytes())
    assert logits[0] == logits[1]
    report = json.loads((tmp_path / "tuned" / "report.json").read_text())
    assert "m1_n1_p2048" in report["tuned"]
    [source] = (tmp_path / "tuned" / "kernels").glob("*.cpp")
    assert "quant_q4_m1_n1_p2048" in source.read_text()
    assert not json.loads((tmp_path / "plain" / "report.json").read_text())["tuned"]
    assert not [p for p in tmp_path.iterdir() if p.name not in ("plain", "tuned")], "candidates are left behind"


@pytest.mark.soak
def test_steps_are_timed_on_every_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> None:
    """With the real clock: whichever candidates win, the engine runs."""
    monkeypatch.setattr(tune, "VARIANTS", ((1, 256),))
    engine = icc.compile(
        tiny_llama, tmp_path / "e", target="native", quant="rtn4", max_seq_len=64, max_batch_size=2, tune=True
    )
    with icc.load(engine, threads=2) as llm:
        assert len(llm.generate([[5, 9]], icc.SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_only_an_engine_for_this_machine_can_be_tuned(tmp_path: Path, tiny_llama: Path) -> None:
    for target in ("cpu", "h100"):
        with pytest.raises(UsageError, match=f"--target {target} is not only for it"):
            icc.compile(tiny_llama, tmp_path / "e", target=target, tune=True)
    assert AVX512VNNI.quant_blocks[0].prefetch == 256 and Block(8, 2).prefetch == 2048
