"""The rendered text of every C++ template at small params, as files: what a change of a template or of its params does.

After a change on purpose: ICC_UPDATE_GOLDEN=1 python -m pytest tests/cpu/test_cpu_snapshots.py, and review the diff
like code. The shared headers are verbatim in every library and have no snapshots.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cpu_cases import add_linear_q
from cpu_harness import Builder
from icc.compiler.backends.cpu.arithmetic import Arithmetic
from icc.compiler.backends.cpu.emit import emit_source, kernel_params
from icc.compiler.backends.cpu.isa import AVX2
from icc.compiler.backends.cpu.kernels.attention import AttentionMicroParams
from icc.compiler.backends.cpu.kernels.micro import DenseMicroParams, MicroTableParams, QuantMicroParams
from icc.compiler.backends.cpu.layouts.affine import BYTES, NIBBLES
from icc.compiler.backends.cpu.layouts.block_reader import reader_of
from icc.compiler.backends.cpu.layouts.float8 import Float8Tiles
from icc.compiler.backends.cpu.layouts.reduced import SIGNED
from icc.compiler.backends.cpu.layouts.split import BOTH, HIGH
from icc.compiler.backends.render import TEMPLATES, render
from icc.compiler.ops.body import Body
from icc.compiler.program.steps.collective import GatherRows
from icc.compiler.program.steps.linear import Columns, Epilogue, ExpertLinear, Extra
from icc.compiler.weights.formats.registry import find_format
from step_making import cache, make_step, rotary

FOLDER = Path(__file__).parent / "snapshots" / "cpp"
ROPE = {"rotary": rotary(8, 64, "interleaved")}
QUERY = {"q_heads": 4, "scale": 0.25}
QUANT = {"stored": "q4g16"}
EXPERTS = {"k": 32, "n": 20, "experts": 3, "topk": 2}


KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear__bf16": ("linear", {"k": 32, "n": 20, "stored": "bf16"}),
    "linear__f32_bias_logit_rows": (
        "linear",
        {
            "k": 32,
            "n": 20,
            "stored": "f32",
            "present": ("bias",),
            "strides": {"x": 40},
            "rows": "logit_rows",
        },
    ),
    "quantize_rows__g16": ("quantize_rows", {"k": 32, "group": 16}),
    "quantize_rows__unsigned": ("quantize_rows", {"k": 32, "group": 16, "unsigned": True}),
    "linear_q__q4": ("linear_q", {"k": 32, "n": 20, **QUANT}),
    "linear_q__q8_bias": (
        "linear_q",
        {"k": 32, "n": 20, "stored": "q8g32", "present": ("bias",), "strides": {"y": 24}},
    ),
    "linear_q__q8s": ("linear_q", {"k": 32, "n": 20, "stored": "q8g16:screen"}),
    "linear_q__q8s_screened": (
        "linear_q",
        {"k": 32, "n": 20, "stored": "q8g16:screen", "screened": True, "rows": "logit_rows"},
    ),
    "expert_linear__f16_bias": ("expert_linear", {**EXPERTS, "stored": "f16", "present": ("bias",)}),
    "expert_linear__f32_per_slot": ("expert_linear", {**EXPERTS, "stored": "f32", "x_per_slot": True}),
    "expert_few__bf16_bias": (
        "expert_linear",
        {**EXPERTS, "topk": 1, "x_per_slot": True, "stored": "bf16", "present": ("bias",)},
    ),
    "expert_linear_q__q4_bias": ("expert_linear_q", {**EXPERTS, **QUANT, "present": ("bias",)}),
    "expert_linear_q__q4_per_slot": ("expert_linear_q", {**EXPERTS, **QUANT, "x_per_slot": True}),
    "embedding__bf16": ("embedding", {"n": 20, "table_rows": 50, "stored": "bf16"}),
    "embedding__tile_f32": ("embedding", {"n": 20, "table_rows": 50, "stored": "f32:product"}),
    "embedding__q4": ("embedding", {"n": 32, "table_rows": 50, "stored": "q4g16"}),
    "embedding__q8": ("embedding", {"n": 32, "table_rows": 50, "stored": "q8g16"}),
    "embedding__q8s": ("embedding", {"n": 32, "table_rows": 50, "stored": "q8g16:screen"}),
    "embedding__e4m3": ("embedding", {"n": 40, "table_rows": 50, "stored": "e4m3_kg32"}),
    "select_rows__f32": ("select_rows", {"n": 20, "strides": {"x": 24}}),
    "rms_norm__d20": ("rms_norm", {"d": 20, "eps": 1e-5}),
    "rms_norm__d16x3_add": (
        "add_rms_norm",
        {"d": 16, "groups": 3, "eps": 1e-6, "strides": {"r": 64}, "present": ("w",)},
    ),
    "layer_norm__d20_plain": ("layer_norm", {"d": 20, "eps": 1e-5, "absent": ("w",)}),
    "layer_norm__d20_add": ("add_layer_norm", {"d": 20, "eps": 1e-5, "present": ("bias",)}),
    "reduce__sum_inner1": ("reduce", {"reduction": "sum", "outer": 2, "n": 7}),
    "reduce__mean_inner3": ("reduce", {"reduction": "mean", "outer": 2, "n": 7, "inner": 3}),
    "reduce__argmax": ("reduce", {"reduction": "argmax", "outer": 2, "n": 7}),
    "reduce__amin_i32": ("reduce", {"reduction": "amin", "outer": 2, "n": 7, "types": ("i32", "i32")}),
    "hadamard__3x64": ("hadamard", {"outer": 3, "n": 64}),
    "softmax__2x17": ("softmax", {"outer": 2, "n": 17}),
    "topk__largest": ("topk", {"outer": 2, "n": 9, "k": 3}),
    "topk__smallest_i32": ("topk", {"outer": 2, "n": 9, "k": 3, "largest": False, "types": ("i32", "i32", "i32")}),
    "gather__4_of_7": ("gather", {"outer": 2, "n": 7, "m": 4, "absent": ("expert",)}),
    "gather__experts": ("gather", {"outer": 2, "n": 9, "m": 9, "experts": 4, "one_line": True}),
    "scatter__value": ("scatter", {"outer": 2, "n": 7, "m": 4, "value": "-inf"}),
    "scatter__add_tensor": ("scatter", {"outer": 2, "n": 7, "m": 4, "reduce": "add", "present": ("src",)}),
    "all_reduce__n20": ("all_reduce", {"n": 20}),
    "all_gather__2x7_of_3": ("all_gather", {"n": 7, "outer": 2, "ranks": 3}),
    "transfer__n20": ("transfer", {"n": 20, "stage": 1}),
    "reduce_scatter__n20": ("reduce_scatter", {"n": 20, "ranks": 2, "least": 32}),
    "cumsum__f32": ("cumsum", {"outer": 2, "n": 9}),
    "gated_scan__delta": (
        "gated_scan",
        {
            "heads": 4,
            "shared": 2,
            "key_dim": 24,
            "value_dim": 40,
            "chunk": 8,
            "delta": True,
            "block_size": 32,
            "present": ("beta",),
        },
    ),
    "gated_scan__row_decay": (
        "gated_scan",
        {"heads": 2, "shared": 2, "key_dim": 256, "value_dim": 16, "chunk": 8, "row_decay": True, "block_size": 16},
    ),
    "selective_scan__f32": ("selective_scan", {"channels": 24, "states": 8, "block_size": 32}),
    "channel_scan__maximum": (
        "channel_scan",
        {"channels": 24, "maximum": True, "start": -1e38, "block_size": 32, "present": ("decay",)},
    ),
    "causal_conv__bias": ("causal_conv", {"channels": 24, "taps": 4, "block_size": 32, "present": ("bias",)}),
    "bmm__weight": ("bmm", {"batch": 2, "m": 3, "k": 9, "n": 17, "strides": {"b": 0}}),
    "bmm__transposed": ("bmm", {"batch": 2, "m": 3, "k": 9, "n": 17, "b_transposed": True}),
    "pointwise__silu_mul": (
        "pointwise",
        {
            "shape": (4, 6),
            "body": Body.parse("t0 = silu a0; t1 = mul t0 a1"),
            "types": ("f32",) * 3,
            "walks": ((6, 1), (0, 1), (6, 1)),
            "strides": {"args.1": 0},
        },
    ),
    "pointwise__strided_i32": (
        "pointwise",
        {
            "shape": (4, 6),
            "body": Body.parse("t0 = remainder a0 3; t1 = where t0 a0 -1"),
            "types": ("i32", "i32"),
            "walks": ((1, 4), (6, 1)),
        },
    ),
    "kv_write__i8": ("kv_write", {**cache(2, 16, 24, "i8", 16)}),
    "kv_write__bf16_rope": ("kv_write", {**cache(2, 16, 24, "bf16", 16), **ROPE, "strides": {"k": 144, "v": 144}}),
    "choose_keys__f16": (
        "choose_keys",
        {**cache(1, 16, 16, "f16", 16, shared=True), "heads": 6, "count": 64, "width": 200},
    ),
    "attention__f32": ("attention", {**cache(2, 16, 24, "f32", 16), **QUERY}),
    "attention__i8_rope_window_softcap_sinks_alibi": (
        "attention",
        {
            **cache(2, 16, 24, "i8", 16),
            **QUERY,
            **ROPE,
            "window": 20,
            "chunk": 32,
            "softcap": 5.0,
            "present": ("sinks", "alibi"),
        },
    ),
}

MICROS = {
    "micro_dense__bf16_m2_n2": DenseMicroParams("dense_bf16_m2_n2", "Bf16", 2, 2, 2048),
    "micro_scaled__m2_n1": DenseMicroParams("m2_n1", "E4m3", 2, 1, 256, Float8Tiles.micro),
    "micro_scaled__kg32_m1_n2": DenseMicroParams("m1_n2", "E4m3", 1, 2, 256, Float8Tiles.micro, 32),
    "micro_quant__q4_m2_n1": QuantMicroParams("quant_q4_m2_n1", NIBBLES, 2, 1, 2048, True),
    "micro_quant__q4_m3_n2_sums16": QuantMicroParams(
        "quant_q4_m3_n2", NIBBLES, 3, 2, 2048, False, Arithmetic.LONG_CHAINS
    ),
    "micro_quant__q8s_m2_n1_sums16": QuantMicroParams(
        "quant_q8s_m2_n1", BOTH, 2, 1, 256, False, Arithmetic.LONG_CHAINS
    ),
    "micro_quant__q8_m2_n1_in_memory": QuantMicroParams("quant_q8_m2_n1", BYTES, 2, 1, 2048, False),
    "micro_quant__q8s_m1_n2": QuantMicroParams("quant_q8s_m1_n2", BOTH, 1, 2, 2048, True),
    "micro_quant__q8s_high_m1_n2": QuantMicroParams("quant_q8s_high_m1_n2", HIGH, 1, 2, 2048, True),
    "micro_quant__q8_m2_n1_pairs": QuantMicroParams("quant_q8_m2_n1", BYTES, 2, 1, 2048, False, Arithmetic.PAIRS),
    "micro_chain__i7_m2_n1": QuantMicroParams("quant_i7_m2_n1", SIGNED, 2, 1, 2048, False, Arithmetic.CHAINS),
    "micro_quant__q8_0_m1_n2_begins": QuantMicroParams("q8_0_m1_n2", reader_of(find_format("q8_0")), 1, 2, 256, True),
    "micro_quant__q4_m3_n1_by_element": QuantMicroParams("q4_m3_n1", NIBBLES, 3, 1, 2048, True, by_element=True),
    "micro_short__q4_k_m1_n2": QuantMicroParams(
        "q4_k_m1_n2", reader_of(find_format("q4_k")), 1, 2, 256, True, Arithmetic.SHORT
    ),
    "micro_short__q8_0_m3_n1_staged": QuantMicroParams(
        "q8_0_m3_n1", reader_of(find_format("q8_0")), 3, 1, 2048, False, Arithmetic.SHORT
    ),
    "micro_amx__q4_m16_n2": QuantMicroParams("quant_q4_m16_n2", NIBBLES, 16, 2, 256, False, Arithmetic.TILES),
    "micro_amx__q8_m32_n2": QuantMicroParams("quant_q8_m32_n2", BYTES, 32, 2, 256, False, Arithmetic.TILES),
    "micro_matrix__q4_m4": QuantMicroParams("quant_q4_m4_n1", NIBBLES, 4, 1, 2048, False, Arithmetic.MATRICES),
    "micro_matrix__q8_m12": QuantMicroParams("quant_q8_m12_n1", BYTES, 12, 1, 2048, False, Arithmetic.MATRICES),
    "micro_table__dense": MicroTableParams(
        "DenseMicro",
        "DENSE_F32",
        (DenseMicroParams("m1_n4", "float", 1, 4, 256), DenseMicroParams("m2_n2", "float", 2, 2, 2048)),
    ),
    "micro_table__q4_0_begins": MicroTableParams(
        "QuantMicro",
        "QUANT_Q4_0",
        (
            QuantMicroParams("q4_0_m1_n2", reader_of(find_format("q4_0")), 1, 2, 256, True),
            QuantMicroParams("q4_0_m6_n1", reader_of(find_format("q4_0")), 6, 1, 2048, False, Arithmetic.MATRICES),
            QuantMicroParams("q4_0_m8_n1", reader_of(find_format("q4_0")), 8, 1, 2048, False, Arithmetic.SHORT),
        ),
    ),
    "micro_qk__m2_v2": AttentionMicroParams("qk", 2, 2),
    "micro_pv__m2_v1": AttentionMicroParams("pv", 2, 1),
    "micro_qk__i8": AttentionMicroParams("qk", 1, 4, integer=True),
    "micro_pv__i8": AttentionMicroParams("pv", 1, 2, 11, integer=True),
}  # fmt: skip
PROGRAM = "program__two_steps"


def rendered() -> dict[str, str]:
    """name -> text of every snapshot."""
    texts = {}
    for name, (op, params) in KERNELS.items():
        texts[name] = kernel_params(make_step(op, int8_rows=op.endswith("_q"), **params), f"k0_{op}", AVX2).source()
    add = make_step("expert_linear", k=8, n=20, experts=3, topk=1, x_per_slot=True, stored="bf16", present=("bias",))
    assert isinstance(add, ExpertLinear)
    epilogue = Epilogue(Body.parse("t0 = add a0 a1"), (Columns(0, 1), Extra(1)), 20)
    add = msgspec.structs.replace(add, extras=(add.y,), epilogue=epilogue)
    texts["expert_add__bf16_bias"] = kernel_params(add, "k0_expert_linear", AVX2).source()
    given = make_step("all_reduce", n=20).operands["x"]
    rows = GatherRows(x=given, y=given, n=20, ranks=2, least=32)
    texts["gather_rows__n20"] = kernel_params(rows, "k0_all_gather_rows", AVX2).source()
    texts |= {name: render(params.template, params) for name, params in MICROS.items()}
    b = Builder()
    add_linear_q(b, np.random.default_rng(0), 16, 5, "q4", 16, False)
    source = emit_source(b.program(), AVX2)
    texts[PROGRAM] = source[source.index("// The program: its steps as a table") :]
    return texts


RENDERED = rendered()


@pytest.mark.parametrize("name", RENDERED)
def test_snapshot(name: str) -> None:
    file = FOLDER / f"{name}.cpp"
    if os.environ.get("ICC_UPDATE_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(RENDERED[name])
    assert RENDERED[name] == file.read_text()


def test_every_template_has_a_snapshot_and_no_snapshot_is_left_over() -> None:
    files = (TEMPLATES / "cpp").rglob("*.jinja")  # those of layouts are macros of others
    templates = {file.name.removesuffix(".cpp.jinja") for file in files if file.parent.name != "layouts"}
    assert {name.split("__")[0] for name in RENDERED} == templates
    assert {file.stem for file in FOLDER.iterdir()} == set(RENDERED)
