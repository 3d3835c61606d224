"""The kind of arithmetic in the micro-kernels of codes, by level and layout: one of a few kinds."""

from __future__ import annotations

import pytest
from icc.compiler.backends.cpu.arithmetic import Arithmetic
from icc.compiler.backends.cpu.isa import AMX, AVX2, AVX512, AVX512VNNI, AVXVNNI, DOTPROD, I8MM, Isa
from icc.compiler.backends.cpu.kernels.linear import blocks_of
from icc.compiler.backends.cpu.kernels.micro import quant_micro
from icc.compiler.backends.cpu.layouts.affine import BYTES, NIBBLES
from icc.compiler.backends.cpu.layouts.block_reader import reader_of
from icc.compiler.backends.cpu.layouts.reduced import SIGNED
from icc.compiler.backends.cpu.layouts.split import BOTH, HIGH
from icc.compiler.backends.render import TEMPLATES
from icc.compiler.weights.formats.registry import find_format

READERS = {
    "q4": NIBBLES,
    "q8": BYTES,
    "q8s": BOTH,
    "q8s_high": HIGH,
    "i7": SIGNED,
    "q4_k": reader_of(find_format("q4_k")),
}


def kinds(isa: Isa, reader: str) -> list[str]:
    """The kinds in a product's micro-kernels, in order of their numbers of rows, each once."""
    found = READERS[reader]
    return list(dict.fromkeys(str(quant_micro("m", found, b, isa).arithmetic) for b in blocks_of(found, isa, 128)))


def test_levels_without_an_instruction_for_bytes_have_what_the_layout_says() -> None:
    assert {reader: kinds(AVX2, reader) for reader in READERS} == {
        "q4": ["quads", "long_chains"],  # for few rows, reading codes takes the time
        "q8": ["pairs"],
        "q8s": ["quads", "long_chains"],  # by its nibbles
        "q8s_high": ["quads", "long_chains"],
        "i7": ["chains"],
        "q4_k": ["short"],
    }


@pytest.mark.parametrize("isa", [AVX512VNNI, AVX512, AVXVNNI, DOTPROD], ids=lambda isa: isa.name)
def test_other_levels_sum_the_products_of_four_k(isa: Isa) -> None:
    assert all(kinds(isa, reader) == ["quads"] for reader in READERS)


@pytest.mark.parametrize(("isa", "kind"), [(AMX, "tiles"), (I8MM, "matrices")], ids=["amx", "i8mm"])
def test_levels_with_matrices_take_them_for_many_rows(isa: Isa, kind: str) -> None:
    assert kinds(isa, "q8") == ["quads", kind]


def test_every_kind_has_a_template() -> None:
    assert all((TEMPLATES / kind.template).is_file() for kind in Arithmetic)
    assert len({kind.template for kind in Arithmetic}) == 5
