"""Snapshots of the templates of products with weights, in all their modes: name -> Point."""

from __future__ import annotations

from icc.compiler.backends.triton.spec import Shape
from icc.compiler.ops.body import Body
from icc.compiler.program.steps.linear import Columns, Epilogue, Extra
from snapshot_point import DECODE, Point

EXPERTS = {"experts": 3, "topk": 2}
GATE = Epilogue(Body.parse("t0 = silu a0; t1 = mul t0 a1"), (Columns(0, 1), Columns(16, 1)), 16)
GATED = {"epilogue": GATE}
ADD = Body.parse("t0 = add a0 a1")
FEW = {"decode": 1, "m": 8, "n": 16, "k": 16, "warps": 2, "stages": 2, "splits": 1}
MANY = {"decode": 0, "m": 16, "n": 32, "k": 64, "warps": 4, "stages": 3, "splits": 1}
SPLIT = {**MANY, "splits": 2}
APART = {**SPLIT, "m": 128}  # more rows than the last program of a tile sums

PRODUCTS: dict[str, Point] = {
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
    "linear_unpack_bytes__q4a8": Point(
        "linear_q",
        {"k": 128, "n": 32, "stored": "q4a8g64"},
        ("bf16", "u8", "", "bf16"),
        tiling={**MANY, "unpacked": 1, "eight": 1},
    ),
    "linear_w8a8__q4a8": Point(
        "linear_q",
        {"k": 128, "n": 64, "stored": "q4a8g64"},
        ("bf16", "u8", "", "bf16"),
        launch=1,
        tiling={**MANY, "k": 64, "eight": 1},
    ),
    "linear_w8a8__q4a8_a100": Point(
        "linear_q",
        {"k": 128, "n": 64, "stored": "q4a8g64"},
        ("bf16", "u8", "", "bf16"),
        target="a100",
        launch=1,
        tiling={**MANY, "k": 64, "eight": 1},
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
}
