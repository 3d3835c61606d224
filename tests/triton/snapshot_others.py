"""Snapshots of all templates except those of products with weights: name -> Point."""

from __future__ import annotations

from icc.compiler.backends.triton.spec import Shape
from icc.compiler.ops.body import Body
from icc.compiler.program.steps.base import CodedRows
from icc.runtime.format.operands import BufferOperand as Buffer
from paged import cache
from snapshot_point import DECODE, MIXED, Point
from step_making import rotary

ROPE = {"rotary": rotary(8, 64, "interleaved")}
FULL_ROPE = {"rotary": rotary(16, 64, "half")}
QUERY = {"q_heads": 4, "scale": 0.25}
LINE = {"outer": 2, "n": 7, "strides": {"x": 16, "y": 16}}
HEADS = {"rows": 16, "heads": 2, "tile": 16, "warps": 4, "stages": 2}

OTHERS: dict[str, Point] = {
    "collective__sum": Point("all_reduce", {"n": 96, "ranks": 2}, ("f32", "f32")),
    "collective__lines": Point("all_gather", {"n": 33, "outer": 2, "ranks": 2}, ("f32", "f32"), DECODE),
    "collective__own_sum": Point("reduce_scatter", {"n": 96, "ranks": 2, "least": 4}, ("f32", "f32")),
    "gathered__lines": Point(
        "all_gather", {"n": 33, "outer": 2, "ranks": 2}, ("f32", "f32"), DECODE, launch=1, target="l4"
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
