"""The rendered text of every Triton template at small params, as files: what a change of a template or its params does.

After a change on purpose: ICC_UPDATE_GOLDEN=1 python -m pytest tests/triton/test_triton_snapshots.py, and review the
diff like code. A file begins with the launch: arguments ("?": of any alignment), grid, warps and stages. Shared parts
without params are verbatim in the sources, and only named here.
"""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from icc.compiler.backends.render import TEMPLATES, render
from icc.compiler.backends.triton.dependent import dependent
from icc.compiler.backends.triton.kernels.pending import PendingKernel
from icc.compiler.backends.triton.kernels.sample import SampleKernel
from icc.compiler.backends.triton.plan import kernel_of
from icc.compiler.backends.triton.spec import LaunchSpec, Shape
from icc.compiler.backends.triton.tiling.choice import Config, Tuner
from icc.compiler.ops.body import Body
from icc.compiler.program.steps.base import CodedRows
from icc.compiler.program.steps.linear import Columns, Epilogue, Extra
from icc.compiler.targets import TARGETS
from icc.runtime.format.manifest import Limits
from icc.runtime.format.operands import BufferOperand as Buffer
from icc.runtime.format.plan import Extent
from paged import cache
from step_making import make_step, rotary

FOLDER = Path(__file__).parent / "snapshots"
TRITON = TEMPLATES / "triton"
LIMITS = Limits(max_seq_len=256, max_batch_size=4, max_step_tokens=32)
DECODE, MIXED = Shape(4, True), Shape(32, False)

ROPE = {"rotary": rotary(8, 64, "interleaved")}
FULL_ROPE = {"rotary": rotary(16, 64, "half")}
QUERY = {"q_heads": 4, "scale": 0.25}
EXPERTS = {"experts": 3, "topk": 2}
GATE = Epilogue(Body.parse("t0 = silu a0; t1 = mul t0 a1"), (Columns(0, 1), Columns(16, 1)), 16)
GATED = {"epilogue": GATE}
ADD = Body.parse("t0 = add a0 a1")
LINE = {"outer": 2, "n": 7, "strides": {"x": 16, "y": 16}}


@dataclass(frozen=True)
class Point:
    """One launch (by number) of one kernel. `types`: of its operands, "" for an absent one. tiling: instead of what the
    target's cost model would choose."""

    op: str
    params: dict[str, Any]
    types: tuple[str, ...] = ()
    shape: Shape = MIXED
    launch: int = 0
    target: str = "h100"
    tiling: Config | None = None

    def spec(self) -> LaunchSpec:
        if self.op in AROUND:
            kernel = AROUND[self.op](**self.params)
        else:
            aligned = tuple(kind != "f32" for kind in self.types)
            kernel = kernel_of(make_step(self.op, self.types, aligned, **self.params))
        return kernel.launches(self.shape, LIMITS, Fixed(TARGETS[self.target], self.tiling))[self.launch]


class Fixed(Tuner):
    """Picks one tiling, where a kernel offers such ones, and of any other choice the second."""

    def __init__(self, target: Any, config: Config | None) -> None:
        super().__init__(target)
        object.__setattr__(self, "config", config)

    def pick(self, key: str, candidates: Any, cost: Any) -> Config:
        config: Config | None = self.config  # type: ignore[attr-defined]
        if config is None or ("splits" in candidates[0] and "m" not in candidates[0]):
            return candidates[min(1, len(candidates) - 1)]
        return config


AROUND: dict[str, Any] = {"pending": PendingKernel, "sample": SampleKernel}
FEW = {"decode": 1, "m": 8, "n": 16, "k": 16, "warps": 2, "stages": 2, "splits": 1}
MANY = {"decode": 0, "m": 16, "n": 32, "k": 64, "warps": 4, "stages": 3, "splits": 1}
SPLIT = {**MANY, "splits": 2}
APART = {**SPLIT, "m": 128}  # more rows than the last program of a tile adds up
HEADS = {"rows": 16, "heads": 2, "tile": 16, "warps": 4, "stages": 2}

POINTS: dict[str, Point] = {
    "linear_decode_dense__bf16": Point(
        "linear", {"k": 64, "n": 32, "stored": "bf16"}, ("bf16", "bf16", "", "bf16"), DECODE, tiling=FEW
    ),
    "linear_decode_dense__f16_bias_residual_odd": Point(
        "linear",
        {
            "k": 40,
            "n": 20,
            "stored": "f16",
            "epilogue": Epilogue(ADD, (Columns(0, 1), Extra(1)), 20),
            "strides": {"x": 48, "extras.0": 40},
        },
        ("f16", "f16", "f32", "f32", "f32"),
        DECODE,
        tiling=FEW,
    ),
    "linear_decode_dense__experts": Point(
        "expert_linear",
        {"k": 64, "n": 32, "stored": "bf16", "x_per_slot": True, **EXPERTS},
        ("bf16", "bf16", "", "i32", "f32"),
        DECODE,
        tiling=FEW,
    ),
    "linear_decode_codes__q4_gated": Point(
        "linear_q",
        {"k": 128, "n": 32, "stored": "q4g64", **GATED},
        ("bf16", "u8", "", "bf16"),
        DECODE,
        tiling={**FEW, "k": 64},
    ),
    "linear_decode_wide__q4_k_gated": Point(
        "linear_q",
        {"k": 768, "n": 32, "stored": "q4_k", **GATED},
        ("bf16", "u8", "", "bf16"),
        Shape(2, True),
        tiling={**FEW, "m": 2, "n": 4, "k": 512, "warps": 4},
    ),
    "linear_decode_wide__mxfp4_experts": Point(
        "expert_linear_q",
        {"k": 64, "n": 20, "stored": "mxfp4", **EXPERTS},
        ("bf16", "u8", "f32", "i32", "bf16"),
        Shape(1, True),
        tiling={**FEW, "m": 1, "k": 512, "warps": 4},
    ),
    "linear_decode_wide__mxfp4a8_row": Point(
        "linear_q",
        {"k": 96, "n": 20, "stored": "mxfp4a8"},
        ("bf16", "u8", "", "bf16"),
        Shape(1, True),
        target="b200",
        tiling={**FEW, "m": 1, "n": 8, "k": 512, "warps": 4},
    ),
    "linear_rows_micro__mxfp8": Point(
        "linear_q",
        {"k": 96, "n": 20, "stored": "mxfp4a8"},
        ("bf16", "u8", "", "bf16"),
        target="b200",
        tiling={**MANY, "n": 128, "k": 128},
    ),
    "linear_scaled__mxfp4a8_gated": Point(
        "linear_q",
        {"k": 192, "n": 32, "stored": "mxfp4a8", **GATED},
        ("bf16", "u8", "", "bf16"),
        launch=1,
        target="b200",
        tiling={**MANY, "n": 128, "k": 128},
    ),
    "linear_scaled__mxfp4a8_experts": Point(
        "expert_linear_q",
        {"k": 256, "n": 20, "stored": "mxfp4a8", "x_per_slot": True, **EXPERTS},
        ("bf16", "u8", "f32", "i32", "bf16"),
        launch=3,
        target="b200",
        tiling={**MANY, "n": 128, "k": 256},
    ),
    "linear_decode_codes__q8_hip_experts": Point(
        "expert_linear_q",
        {"k": 64, "n": 20, "stored": "q8g32", **EXPERTS},
        ("f16", "u8", "f32", "i32", "f16"),
        DECODE,
        target="mi300x",
        tiling={**FEW, "m": 16, "k": 32},
    ),
    "linear_tile__bf16": Point(
        "linear", {"k": 64, "n": 32, "stored": "bf16"}, ("bf16", "bf16", "", "bf16"), tiling=MANY
    ),
    "linear_tile__f32_wide_bias_odd": Point(
        "linear",
        {"k": 40, "n": 20, "stored": "f32", "rows": "logit_rows"},
        ("f32", "f32", "f32", "f32"),
        tiling={**MANY, "k": 32},
    ),
    "linear_tile__q4_gated": Point(
        "linear_q", {"k": 128, "n": 32, "stored": "q4g64", **GATED}, ("bf16", "u8", "", "bf16"), tiling=MANY
    ),
    "linear_tile__q4_whole_values": Point(
        "linear_q", {"k": 128, "n": 64, "stored": "q4g64"}, ("f16", "u8", "", "f16"), tiling={**MANY, "n": 64}
    ),
    "linear_tile__q4_k": Point(
        "linear_q", {"k": 768, "n": 32, "stored": "q4_k"}, ("bf16", "u8", "", "bf16"), tiling={**MANY, "k": 128}
    ),
    "linear_unpack__q4": Point(
        "linear_q",
        {"k": 128, "n": 32, "stored": "q4g64"},
        ("bf16", "u8", "", "bf16"),
        tiling={**MANY, "unpacked": 1},
    ),
    "linear_tile__q8_hip": Point(
        "linear_q",
        {"k": 64, "n": 32, "stored": "q8g32"},
        ("f16", "u8", "", "f16"),
        target="mi300x",
        tiling={**MANY, "k": 32, "stages": 2},
    ),
    "linear_rows__int8": Point("linear_q", {"k": 128, "n": 32, "stored": "i8g128"}, ("bf16", "u8", "", "bf16")),
    "linear_rows__e4m3_blocks": Point("linear_q", {"k": 256, "n": 32, "stored": "e4m3_kg96"}, ("f16", "u8", "", "f16")),
    "linear_w8a8__int8": Point(
        "linear_q", {"k": 128, "n": 32, "stored": "i8g128"}, ("bf16", "u8", "", "bf16"), launch=1
    ),
    "linear_w8a8__e4m3": Point(
        "linear_q", {"k": 256, "n": 64, "stored": "e4m3", **GATED}, ("bf16", "u8", "", "bf16"), launch=1, tiling=MANY
    ),
    "linear_w8a8__e4m3_b200": Point(
        "linear_q",
        {"k": 256, "n": 64, "stored": "e4m3"},
        ("bf16", "u8", "", "bf16"),
        target="b200",
        launch=1,
        tiling=MANY,
    ),
    "linear_w8a8__e4m3_blocks_split": Point(
        "linear_q", {"k": 256, "n": 64, "stored": "e4m3_kg64"}, ("bf16", "u8", "", "bf16"), launch=1, tiling=SPLIT
    ),
    "linear_decode_eight__e4m3_row_of_experts": Point(
        "expert_linear_q",
        {"k": 64, "n": 16, "stored": "e4m3", **EXPERTS},
        ("bf16", "u8", "", "i32", "bf16"),
        Shape(1, True),
        tiling={**FEW, "k": 64},
    ),
    "linear_decode_eight__int8_row": Point(
        "linear_q",
        {"k": 128, "n": 32, "stored": "i8g128"},
        ("bf16", "u8", "", "bf16"),
        Shape(1, True),
        tiling={**FEW, "k": 128},
    ),
    "linear_w8a8__e4m3_experts": Point(
        "expert_linear_q",
        {"k": 128, "n": 32, "stored": "e4m3", **EXPERTS},
        ("bf16", "u8", "", "i32", "bf16"),
        launch=3,
        tiling={**MANY, "n": 64, "k": 128},
    ),
    "linear_decode_eight__e4m3_blocks": Point(
        "linear_q",
        {"k": 256, "n": 32, "stored": "e4m3_kg128"},
        ("bf16", "u8", "", "bf16"),
        DECODE,
        launch=1,
        tiling={**FEW, "k": 128},
    ),
    "linear_tile__q4_wide": Point(
        "linear_q", {"k": 64, "n": 32, "stored": "q4g32"}, ("f32", "u8", "", "f32"), tiling={**MANY, "k": 32}
    ),
    "linear_tile__experts_q4": Point(
        "expert_linear_q",
        {"k": 128, "n": 32, "stored": "q4g64", **EXPERTS},
        ("bf16", "u8", "", "i32", "bf16"),
        launch=2,
        tiling=MANY,
    ),
    "linear_tile__split": Point(
        "linear", {"k": 128, "n": 32, "stored": "bf16"}, ("bf16", "bf16", "", "bf16"), tiling=SPLIT
    ),
    "linear_reduce__plain": Point(
        "linear", {"k": 128, "n": 32, "stored": "bf16"}, ("bf16", "bf16", "", "bf16"), launch=1, tiling=APART
    ),
    "linear_reduce__bias_residual": Point(
        "linear",
        {
            "k": 128,
            "n": 32,
            "stored": "bf16",
            "epilogue": Epilogue(ADD, (Columns(0, 1), Extra(1)), 32),
            "strides": {"extras.0": 40},
        },
        ("bf16", "bf16", "f32", "f32", "f32"),
        launch=1,
        tiling=APART,
    ),
    "linear_expert_sort__3x2": Point(
        "expert_linear",
        {"k": 64, "n": 32, "stored": "bf16", **EXPERTS},
        ("bf16", "bf16", "", "i32", "bf16"),
        launch=0,
        tiling=MANY,
    ),
    "linear_expert_sort__8x1": Point(
        "expert_linear",
        {"k": 64, "n": 32, "stored": "bf16", "experts": 8, "topk": 1},
        ("bf16", "bf16", "", "i32", "bf16"),
        launch=1,
        tiling=MANY,
    ),
    "attention_mixed__bf16": Point(
        "attention",
        {**cache(2, 16, 24, "bf16", 16), **QUERY},
        ("bf16", "", "", "", "", "", "", "", "bf16"),
        shape=Shape(512, False),
        tiling=HEADS,
    ),
    "attention_mixed__i8_rope_window_softcap_sinks_alibi": Point(
        "attention",
        {
            **cache(2, 16, 24, "i8", 16),
            **QUERY,
            **ROPE,
            "window": 20,
            "chunk": 32,
            "softcap": 5.0,
        },
        ("bf16", "f32", "f32", "f32", "f32", "", "", "", "f32"),
        tiling=HEADS,
    ),
    "choose_scores__i4": Point(
        "choose_keys",
        {**cache(1, 40, 40, "i4", 16, shared=True), "heads": 70, "count": 8, "width": 256, "strides": {"w": 80}},
        ("bf16", "bf16", "bf16"),
    ),
    "choose_scores__decode_bf16": Point(
        "choose_keys",
        {**cache(1, 32, 32, "bf16", 16, shared=True), "heads": 4, "count": 8, "width": 256, "strides": {"w": 8}},
        ("bf16", "bf16", "bf16"),
        DECODE,
    ),
    "choose_keys__bf16": Point(
        "choose_keys",
        {**cache(1, 32, 32, "bf16", 16, shared=True), "heads": 4, "count": 8, "width": 256, "strides": {"w": 8}},
        ("bf16", "bf16", "bf16"),
        launch=1,
    ),
    "attention_decode__f16_rope": Point(
        "attention",
        {**cache(2, 16, 24, "f16", 16), **QUERY, **FULL_ROPE},
        ("f16", "f32", "f32", "", "", "", "", "", "f16"),
        DECODE,
        tiling=HEADS,
    ),
    "attention_decode__i8_one_program_sinks": Point(
        "attention",
        {**cache(2, 16, 24, "i8", 24), **QUERY, "window": 4},
        ("f32", "", "", "f32", "", "", "", "", "f32"),
        DECODE,
        tiling=HEADS,
    ),
    "attention_merge__plain": Point(
        "attention",
        {**cache(2, 16, 24, "bf16", 16), **QUERY},
        ("bf16", "", "", "", "", "", "", "", "bf16"),
        MIXED,
        1,
        tiling=HEADS,
    ),
    "attention_merge__sinks": Point(
        "attention",
        {**cache(2, 16, 24, "f32", 16), **QUERY},
        ("f32", "", "", "f32", "", "", "", "", "f32"),
        MIXED,
        1,
        tiling=HEADS,
    ),
    "kv_move__bf16": Point(
        "kv_write", {**cache(2, 16, 24, "bf16", 16), "strides": {"k": 32, "v": 48}}, ("bf16", "bf16", "", "")
    ),
    "kv_move__i8": Point(
        "kv_write", {**cache(2, 16, 24, "i8", 16), "strides": {"k": 32, "v": 48}}, ("f32", "f32", "", "")
    ),
    "kv_write__i8": Point(
        "kv_write", {**cache(2, 16, 24, "i8", 16), "strides": {"k": 32, "v": 48}}, ("f32", "f32", "", ""), launch=1
    ),
    "kv_write__bf16_rope": Point(
        "kv_write",
        {**cache(2, 16, 24, "bf16", 16), **ROPE, "strides": {"k": 144, "v": 144}},
        ("bf16", "bf16", "f32", "f32"),
        launch=1,
    ),
    "take_rows__embedding_bf16": Point(
        "embedding", {"n": 20, "table_rows": 50, "stored": "bf16", "strides": {"y": 20}}, ("i32", "bf16", "f32")
    ),
    "take_rows__logit_rows": Point(
        "select_rows", {"n": 20, "rows": "logit_rows", "strides": {"x": 24, "y": 20}}, ("f32", "f32")
    ),
    "take_codes__q4": Point(
        "embedding",
        {"n": 64, "table_rows": 50, "stored": "q4g32", "strides": {"y": 64}},
        ("i32", "u8", "bf16"),
    ),
    "take_codes__q8": Point(
        "embedding",
        {"n": 48, "table_rows": 50, "stored": "q8g16", "strides": {"y": 48}},
        ("i32", "u8", "f32"),
    ),
    "norm__add_rms_fp8": Point(
        "add_rms_norm",
        {"d": 20, "eps": 1e-5, "coding": "fp8", "coded": CodedRows(Buffer("c", "u8", 20), Buffer("s", "f32", 1))},
    ),
    "norm__rms_mxfp8": Point(
        "rms_norm",
        {"d": 96, "eps": 1e-5, "coding": "mxfp8", "coded": CodedRows(Buffer("c", "u8", 96), Buffer("s", "i32", 1))},
    ),
    "norm__rms_d20": Point(
        "rms_norm",
        {"d": 20, "groups": 1, "eps": 1e-5, "strides": {"x": 24, "y": 20}},
        ("f32", "f32", "bf16"),
    ),
    "norm__add_rms_d16x3": Point(
        "add_rms_norm",
        {"d": 16, "groups": 3, "eps": 1e-6, "strides": {"x": 48, "y": 48, "r": 64, "sum": 48}},
        ("f32", "bf16", "f32", "bf16", "f32"),
    ),
    "norm__layer_plain": Point(
        "layer_norm",
        {"d": 20, "groups": 1, "eps": 1e-5, "strides": {"x": 20, "y": 20}},
        ("f32", "", "", "f32"),
    ),
    "norm__add_layer_d20": Point(
        "add_layer_norm",
        {"d": 20, "groups": 1, "eps": 1e-5, "strides": {"x": 20, "y": 20, "r": 20, "sum": 20}},
        ("f16", "f16", "f32", "f32", "f16", "f32"),
    ),
    "reduce__sum_bf16": Point("reduce", {**LINE, "reduction": "sum"}, ("bf16", "f32")),
    "reduce__mean_inner3": Point(
        "reduce", {**LINE, "reduction": "mean", "inner": 3, "strides": {"x": 42, "y": 16}}, ("f32", "f32")
    ),
    "reduce__argmax_long": Point(
        "reduce", {**LINE, "reduction": "argmax", "n": 1100, "strides": {"x": 2200, "y": 16}}, ("f32", "i32")
    ),
    "reduce__amin_i32": Point("reduce", {**LINE, "reduction": "amin"}, ("i32", "i32")),
    "reduce__prod": Point("reduce", {**LINE, "reduction": "prod"}, ("f32", "f32")),
    "hadamard__3x64_bf16": Point("hadamard", {"outer": 3, "n": 64, "strides": {"x": 192, "y": 192}}, ("bf16", "bf16")),
    "softmax__2x17": Point("softmax", {**LINE, "n": 17, "strides": {"x": 34, "y": 34}}, ("f32", "f32")),
    "softmax__long_bf16": Point(
        "softmax", {"outer": 1, "n": 8200, "strides": {"x": 8200, "y": 8200}}, ("bf16", "bf16")
    ),
    "cumsum__f32": Point("cumsum", {**LINE, "n": 9, "strides": {"x": 18, "y": 18}}, ("f32", "f32")),
    "gated_scan__delta_bf16": Point(
        "gated_scan",
        {"heads": 4, "shared": 2, "key_dim": 24, "value_dim": 40, "chunk": 0, "delta": True, "block_size": 32},
        ("bf16", "bf16", "bf16", "f32", "f32", "bf16"),
        DECODE,
    ),
    "gated_chunks__delta_bf16": Point(
        "gated_scan",
        {"heads": 4, "shared": 2, "key_dim": 72, "value_dim": 40, "chunk": 0, "delta": True, "block_size": 32},
        ("bf16", "bf16", "bf16", "f32", "f32", "bf16"),
        launch=1,
    ),
    "gated_chunks__state_space": Point(
        "gated_scan",
        {"heads": 2, "shared": 1, "key_dim": 16, "value_dim": 16, "chunk": 0, "block_size": 32},
        ("f32", "f32", "f32", "f32", "", "f32"),
    ),
    "gated_scan__row_decay": Point(
        "gated_scan",
        {"heads": 2, "shared": 2, "key_dim": 16, "value_dim": 16, "chunk": 0, "row_decay": True, "block_size": 32},
        ("f32", "f32", "f32", "f32", "", "f32"),
    ),
    "selective_scan__bf16": Point(
        "selective_scan", {"channels": 24, "states": 8, "block_size": 32}, ("bf16", "f32", "f32", "f32", "f32", "bf16")
    ),
    "channel_scan__f32": Point("channel_scan", {"channels": 24, "block_size": 32}, ("f32", "f32", "f32")),
    "causal_conv__bias_bf16": Point(
        "causal_conv",
        {"channels": 24, "taps": 4, "block_size": 32, "strides": {"x": 72, "y": 24}},
        ("bf16", "f32", "f32", "f32"),
    ),
    "cumsum__long_i32": Point("cumsum", {"outer": 1, "n": 4100, "strides": {"x": 4100, "y": 4100}}, ("i32", "i32")),
    "topk__largest": Point(
        "topk",
        {"outer": 2, "n": 9, "k": 3, "strides": {"x": 18, "values": 6, "indices": 6}},
        ("bf16", "bf16", "i32"),
    ),
    "topk__smallest_i32": Point(
        "topk",
        {"outer": 1, "n": 40, "k": 1, "largest": False, "strides": {"x": 40, "values": 1, "indices": 1}},
        ("i32", "i32", "i32"),
    ),
    "gather__4_of_7": Point(
        "gather", {**LINE, "m": 4, "strides": {"x": 16, "y": 16, "index": 8}}, ("f32", "i32", "", "f32")
    ),
    "gather__experts": Point(
        "gather",
        {**LINE, "m": 9, "experts": 4, "one_line": True, "strides": {"x": 16, "y": 18, "expert": 2}},
        ("f32", "i32", "i32", "f32"),
    ),
    "gather__long_i32": Point(
        "gather", {**LINE, "m": 1100, "strides": {"x": 16, "y": 2200, "index": 2200}}, ("i32", "i32", "", "i32")
    ),
    "scatter__value": Point(
        "scatter",
        {**LINE, "m": 4, "value": "-inf", "strides": {"x": 16, "y": 16, "index": 8}},
        ("f32", "i32", "", "f32"),
    ),
    "scatter__add_tensor_many": Point(
        "scatter",
        {**LINE, "m": 20, "reduce": "add", "strides": {"x": 16, "y": 16, "index": 40, "src": 40}},
        ("f32", "i32", "f32", "f32"),
    ),
    "bmm__rows_of_weight": Point(
        "bmm",
        {"batch": 2, "m": 1, "k": 40, "n": 17, "strides": {"a": 80, "b": 0, "c": 34}},
        ("bf16", "bf16", "bf16"),
        tiling={"m": 16, "n": 32, "k": 32},
    ),
    "bmm__transposed_vector": Point(
        "bmm",
        {"batch": 2, "m": 3, "k": 9, "n": 17, "b_transposed": True, "strides": {"a": 54, "b": 306, "c": 102}},
        ("f32", "f32", "f32"),
    ),
    "pointwise__silu_mul": Point(
        "pointwise",
        {
            "shape": (4, 6),
            "walks": ((6, 1), (0, 1), (6, 1)),
            "strides": {"args.1": 0},
            "body": Body.parse("t0 = silu a0; t1 = mul t0 a1"),
        },
        ("bf16", "f32", "bf16"),
    ),
    "pointwise__strided_i32": Point(
        "pointwise",
        {"shape": (4, 6), "walks": ((1, 4), (6, 1)), "body": Body.parse("t0 = remainder a0 3; t1 = where t0 a0 -1")},
        ("i32", "i32"),
    ),
    "pointwise__wide_scalar": Point(
        "pointwise",
        {
            "shape": (1280,),
            "walks": ((1,), (0,), (1,)),
            "strides": {"args.1": 0},
            "body": Body.parse("t0 = add a0 a1"),
        },
        ("f16", "f32", "f16"),
    ),
    "pending__128": Point("pending", {}),
    "sample_scan__vocab_100": Point("sample", {"vocab": 100}),
    "sample_scan__vocab_40000": Point("sample", {"vocab": 40000, "stride": 40064}),
    "sample_choose__vocab_100": Point("sample", {"vocab": 100}, launch=1),
    "sample_choose__vocab_40000": Point("sample", {"vocab": 40000, "stride": 40064}, launch=1),
}
SPECS = {name: point.spec() for name, point in POINTS.items()}


def shared_parts() -> dict[str, str]:
    """The templates that others include or take macros from: name -> its text."""
    texts = {file.relative_to(TEMPLATES).as_posix(): file.read_text() for file in TRITON.rglob("*.jinja")}
    included = {name for text in texts.values() for name in re.findall(r'(?:include|from|import) "(.*?)"', text)}
    return {name: texts[name] for name in included}


def snapshot(spec: LaunchSpec) -> str:
    """The launch in one comment, then the source with verbatim parts as their names."""
    args = ", ".join(f"{a.name}{'' if a.aligned else '?'}: {a.type}" for a in spec.args)
    grid = ", ".join(map(extent_text, spec.grid))
    text = spec.source
    for name, part in shared_parts().items():
        if "{{" not in part and "{%" not in part:
            text = text.replace(render(name, None).strip("\n"), f"# {name}")
    return f"# {spec.entry}({args})\n# grid ({grid}), {spec.num_warps} warps, {spec.num_stages} stages\n{text}"


def extent_text(extent: Extent) -> str:
    """Such as `2 * ceil(num_tokens / 16) + 1`."""
    terms = [f"{t.times} * ceil({t.size} / {t.divide})" for t in extent.terms]
    return " + ".join([*terms, *([str(extent.constant)] if extent.constant or not terms else [])])


@pytest.mark.parametrize("name", SPECS)
def test_snapshot(name: str) -> None:
    file, text = FOLDER / f"{name}.py", snapshot(SPECS[name])
    if os.environ.get("ICC_UPDATE_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("name", SPECS)
def test_source_is_python_with_the_entry_and_its_arguments(name: str) -> None:
    spec = SPECS[name]
    functions = {f.name: f for f in ast.parse(spec.source).body if isinstance(f, ast.FunctionDef)}
    assert [a.arg for a in functions[spec.entry].args.args] == [a.name for a in spec.args]


@pytest.mark.parametrize("name", SPECS)
def test_the_kernel_waits_before_it_touches_memory_that_kernels_write(name: str) -> None:
    """Before that it may only ask for weights to come near."""
    spec = dependent(SPECS[name])
    [kernel] = (f for f in ast.parse(spec.source).body if isinstance(f, ast.FunctionDef) and f.name == spec.entry)
    lines = [ast.unparse(line) for line in kernel.body[ast.get_docstring(kernel) is not None :]]
    wait = next(at for at, line in enumerate(lines) if line.endswith("gdc_wait()"))
    before = [line for line in lines[:wait] if not line.startswith("if not INTERPRETED:\n    ask(w_ptr")]
    assert not any("_ptr" in line for line in before) and spec.dependent
    assert spec.source.count("gdc_wait()") == 1


def test_every_template_has_a_snapshot_and_no_snapshot_is_left_over() -> None:
    own = {file.relative_to(TRITON).as_posix() for file in TRITON.rglob("*.jinja")}
    own -= {name.removeprefix("triton/") for name in shared_parts()}
    own = {name for name in own if not name.startswith(("layouts/", "kv/"))}  # macros of others, their check
    assert {name.split("__")[0] for name in SPECS} == {f.removesuffix(".py.jinja").replace("/", "_") for f in own}
    assert {file.stem for file in FOLDER.iterdir()} == set(SPECS)
