"""Random configurations of many model types, whole engines against transformers: benchmarks/family_variants.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import icc
import pytest
from sizes import size_of

TYPES = (
    "qwen3_next lfm2 granitemoehybrid nemotron_h falcon_h1 jamba kimi_linear minimax bamba zamba2 recurrent_gemma rwkv "
    "xlstm mamba2 deepseek_v3 longcat_flash gemma3_text gemma3n_text gpt_oss llama4_text inkling_text mistral"
).split()


@pytest.mark.soak
def test_drawn_configurations_are_equal() -> None:
    script = Path(icc.__file__).parent / "benchmarks" / "family_variants.py"
    cases = ["--engine", "--cases", str(size_of("drawn_configurations")), "--seed", "900"]
    done = subprocess.run([sys.executable, script, *TYPES, *cases], capture_output=True, text=True)
    wrong = [line for line in done.stdout.splitlines() if " WRONG " in line]
    assert done.returncode == 0 and not wrong, "\n".join(wrong) or done.stderr[-2000:]
    assert done.stdout.count(" equal ") >= len(TYPES) * size_of("drawn_configurations") // 2
