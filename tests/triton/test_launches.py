"""The number of kernels per layer when few sequences are decoded: each launch costs a microsecond or more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from building import build
from icc.compiler.backends.triton.plan import Planned, plan_program
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.backends.triton.tiling.tuned import load_tuned
from icc.compiler.options import CompileOptions
from icc.compiler.planning.plan import make_plan as plan_model
from icc.compiler.program.program import Program
from icc.compiler.program.steps.attention import Attention
from icc.compiler.targets import TARGETS
from icc.runtime.format.manifest import Limits
from icc.runtime.format.plan import SIZES
from sizes import soak

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
CODED = 2  # products whose rows a separate kernel rounds to 8 bits: those without a norm before
BUDGET = 5  # q, k and v; attention; its output and the norm; gate and up; down and the norm


def launches(program: Program, limits: Limits, target: str, sequences: int) -> list[int]:
    """The number of kernels that a decode step launches for each step of the program."""
    planned: Planned = plan_program(
        program, limits, Tuner(TARGETS[target], load_tuned(TARGETS[target])), [Shape(sequences, True)]
    )
    [phase] = planned.phases
    sizes = dict.fromkeys(SIZES, sequences) | {"num_moves": 0}
    return [
        sum(all(dim.value(sizes) for dim in spec.grid) for spec in phase.specs[step.kernel]) for step in program.steps
    ]


def check(program: Program, limits: Limits, target: str, more: int = 0) -> None:
    """Check the launches from the end of one layer's attention to that of the next. more: launches beyond the budget
    that are allowed from two sequences on."""
    first, second, *_ = (at for at, step in enumerate(program.steps) if isinstance(step, Attention))
    for sequences, most in ((1, BUDGET), (4, BUDGET + 2), (16, BUDGET + 3)):
        counts = launches(program, limits, target, sequences)
        assert sum(counts[first + 1 : second + 1]) <= most + more * (sequences > 1), (target, sequences, counts)
        assert sum(counts[:first]) <= 3 + (more > 0)  # the embedding, its norm, q, k and v


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_a_layer_stays_within_its_budget(quant: str, tiny: Any, tmp_path: Path) -> None:
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path, "bfloat16")
    engine = build(tmp_path, quant, Limits(max_seq_len=64, max_batch_size=16, max_step_tokens=24))
    check(engine.program, engine.limits, "h100", CODED * (quant == "int8"))


@pytest.mark.parametrize("quant", soak("none", "rtn4", "fp8", "int8", "nf4"))
def test_a_layer_of_llama_8b_does(quant: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    names = ["h100", "b200", "a100", "l40s", "mi300x"]
    options = CompileOptions(model=tmp_path, output=Path(), target=names[0], quant=quant, max_seq_len=8192)
    for name, planned in zip(names, plan_model(options, names).targets, strict=True):
        # several rows are rounded to 8 bits before each of these products
        eight = quant == "int8" or (quant == "fp8" and TARGETS[name].float8)
        unpacked = quant == "nf4" and name == "b200"  # or split in many tiles, which another kernel finishes
        check(planned.planned.program, planned.planned.limits, name, CODED * (eight or unpacked))
