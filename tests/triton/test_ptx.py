"""Code that Triton's interpreter never executes: inline PTX over all codes, `tl.sort`, and numbers built from bits."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from icc.compiler.backends.triton.interpreter import load_source
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.weights.formats.registry import find_format
from interpreting import LIMITS, make_kernel
from products import Forced
from ptx import bf16, blocks, execute

TEMPLATES = Path(__file__).parents[2] / "codegen_templates" / "triton"
SNAPSHOTS = Path(__file__).with_name("snapshots")
CODES = np.arange(1 << 16, dtype=np.uint32)
SORT = """import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, y_ptr, N: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, N), tl.sort(tl.load(x_ptr + tl.arange(0, N)), descending=True))
"""


def test_no_inline_ptx_is_left_out() -> None:
    """Every template with inline PTX is executed here, or only prefetches cache lines, which gives no values."""
    found = {str(file.relative_to(TEMPLATES)) for file in TEMPLATES.rglob("*.jinja") if blocks(file.read_text())}
    looked_up = {"layouts/affine.py.jinja", "layouts/blocks.py.jinja", "layouts/float8.py.jinja"}
    assert found == looked_up | {"linear/decode_head.py.jinja"}


def nibble_sources() -> list[Path]:
    return [file for file in sorted(SNAPSHOTS.glob("*.py")) if "def nibbles" in file.read_text()]


@pytest.mark.parametrize("file", nibble_sources(), ids=lambda file: file.stem)
def test_nibbles_are_operands(file: Path) -> None:
    """All 65,536 codes of four fields, in both halves of a register: b + field, or field times 2^-24, exactly."""
    source = file.read_text()
    [text] = blocks(source)
    is_bf16 = re.search(r"dtype=\(tl\.(bfloat16|float16)", source)[1] == "bfloat16"  # type: ignore[index]
    bias = re.search(r'"""(\d+) \+ bits exactly', source)  # else fields are the last bits of float16: subnormal
    other = CODES[::-1]
    fields = execute(text, 4, [CODES | other << np.uint32(16)])
    for number, register in enumerate(fields):
        for half, codes in ((register, CODES), (register >> np.uint32(16), other)):
            value = bf16(half) if is_bf16 else (half & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16)
            field = (codes >> np.uint32(4 * number) & np.uint32(15)).astype(np.float64)
            expected = float(bias[1]) + field if bias is not None else field * 2.0**-24
            np.testing.assert_array_equal(value.astype(np.float64), expected)


def test_floats_of_8_bits_are_numbers() -> None:
    """All 256 codes in each of the four places, with all others beside them: exactly the e4m3 values, as bf16."""
    [text] = blocks((TEMPLATES / "layouts" / "float8.py.jinja").read_text())
    codes = np.arange(256, dtype=np.uint32)
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64).numpy()
    known = ~np.isnan(expected)  # weights have no NaN codes
    for turn in range(0, 256, 51):
        bytes_ = [np.roll(codes, place * turn) for place in range(4)]
        packed = sum(byte << np.uint32(8 * place) for place, byte in enumerate(bytes_))
        first, second = execute(text, 2, [np.asarray(packed, dtype=np.uint32)])
        halves = (first, first >> np.uint32(16), second, second >> np.uint32(16))
        for half, byte in zip(halves, bytes_, strict=True):
            found, wanted = bf16(half).astype(np.float64), expected[byte]
            np.testing.assert_array_equal(found[known[byte]], wanted[known[byte]])
            assert (np.signbit(found) == np.signbit(wanted))[known[byte]].all(), "a zero keeps its sign"


@pytest.mark.parametrize("stored", ["nf4g64", "iq4_nl"])
def test_levels_are_those_of_the_table(stored: str) -> None:
    """All 256 bytes in each of the four places, with others beside them: both levels of each are exact."""
    config = {"decode": 0, "m": 16, "n": 64, "k": 64, "warps": 4, "stages": 3, "splits": 1}
    k = 4096
    kernel = make_kernel("linear_q", k=k, n=64, stored=stored, types=("bf16", "u8", "", "bf16"))
    [launch] = kernel.launches(Shape(1024, False), LIMITS, Forced(config, "h100"))[:1]
    [text] = [block for block in blocks(launch.source) if "prmt" in block]
    table = np.array(find_format(stored).table, np.float32)
    codes = np.arange(256, dtype=np.uint32)
    places = [np.roll(codes, place * 77) for place in range(4)]
    packed = np.asarray(sum(byte << np.uint32(8 * place) for place, byte in enumerate(places)), np.uint32)
    found = execute(text, 8, [packed])
    for place, byte in enumerate(places):
        for half, level in ((byte & 15, found[place]), (byte >> 4, found[4 + place])):
            np.testing.assert_array_equal(level, table[half].view(np.uint32))


def test_a_wrong_instruction_is_noticed() -> None:
    """The emulator detects a wrong table, a wrong selector and a wrong power."""
    text = blocks((TEMPLATES / "layouts" / "float8.py.jinja").read_text())[0]
    codes = np.arange(256, dtype=np.uint32) * np.uint32(0x01010101)
    right = execute(text, 2, [codes])
    for old, new in (("0xEA", "0xE8"), ("0x3424", "0x2434"), ("0x7B807B80", "0x7B007B80"), ("a, 4", "a, 3")):
        assert old in text
        wrong = execute(text.replace(old, new), 2, [codes])
        assert old == "0x3424" or any((one != other).any() for one, other in zip(right, wrong, strict=True)), old
    spread = np.array([0x31323334], dtype=np.uint32)
    assert execute(text, 2, [spread])[1] != execute(text.replace("0x3424", "0x2434"), 2, [spread])[1]


def test_sort_sorts() -> None:
    """`tl.sort` itself, on keys of the sampler's width."""
    source = np.random.default_rng(0)
    keys = source.integers(-(2**62), 2**62, 32)
    keys[5:9] = keys[4]  # equal ones
    x, y = torch.from_numpy(keys), torch.zeros(32, dtype=torch.int64)
    load_source(SORT).kernel[(1,)](x, y, N=32)
    np.testing.assert_array_equal(y.numpy(), np.sort(keys)[::-1])
