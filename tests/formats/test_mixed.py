"""Encoding in block formats: ggml's formats that can be encoded, and icc's own for `--quant auto`."""

from __future__ import annotations

from itertools import pairwise

import gguf
import pytest
import torch
from icc.compiler.weights.formats.base import Misfit
from icc.compiler.weights.formats.fitting import BlockCoder, encode_blocks, fit_blocks
from icc.compiler.weights.formats.ggml import GGML_FORMATS
from icc.compiler.weights.formats.mixed import mixed
from icc.compiler.weights.formats.registry import find_format

NAMES = ["n2g32b192", "n3g32b192", "n4g32b192", "s3g16b96", "s5g32b192", "s6g32b192", "s8g64b192", "a4g32b192"]


def values(rows: int = 24, k: int = 576) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randn(rows, k, generator=random) * torch.rand(rows, 1, generator=random)


def loss(name: str, x: torch.Tensor) -> float:
    return float((find_format(name).rounded(x) - x).square().sum() / x.square().sum())


def test_names_and_blocks_that_fit() -> None:
    assert [mixed("n", 4, 32, k).name for k in (576, 1536, 96)] == ["n4g32b288", "n4g32b256", "n4g32b96"]
    assert find_format("n4g32b288") == mixed("n", 4, 32, 576)
    with pytest.raises(Misfit, match="K = 48"):
        mixed("n", 4, 32, 48)
    for wrong in ("n5g32b192", "n4g32b48", "s7g32b96", "n4g32b640"):
        with pytest.raises(Exception, match="unknown storage format"):
            find_format(wrong)


def test_more_bits_are_nearer_and_tables_are_nearer_than_steps() -> None:
    x = values()
    losses = [loss(name, x) for name in ("n2g32b192", "n3g32b192", "n4g32b192", "s5g32b192", "s6g32b192", "s8g64b192")]
    assert all(a > 2.5 * b for a, b in pairwise(losses)), losses
    assert loss("n4g32b192", x) < 0.9 * loss("s4g32b192", x) and loss("n4g32b192", x) < loss("q4g32", x)


@pytest.mark.parametrize("name", NAMES)
def test_codes_are_the_nearest_and_mean_what_decoding_says(name: str) -> None:
    form, x = find_format(name), values(6)
    parts = form.encode(x).parts  # type: ignore[attr-defined]
    coder = BlockCoder(form)  # type: ignore[arg-type]
    levels = [level.repeat_interleave(coder.group, -1) for level in coder.levels(parts)]
    assert torch.equal(coder.value(parts["codes"].float(), *levels), form.decode(parts))
    near = (form.decode(parts) - x).abs()
    for step in (-1, 1):
        other = coder.value((parts["codes"].float() + step).clamp(0, 2**form.bits - 1), *levels)  # type: ignore[attr-defined]
        assert bool((near <= (other - x).abs() + 1e-6).all())


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_no_farther_than_the_gguf_package_encodes(kind: str) -> None:
    x, number = values(), gguf.GGMLQuantizationType[kind.upper()]
    theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(x.numpy(), number), number))
    ours = GGML_FORMATS[kind].rounded(x)
    assert (ours - x).square().sum() <= (theirs - x).square().sum() * 1.001
    again = GGML_FORMATS[kind].rounded(theirs)  # values of the format are kept
    assert (again - theirs).abs().max() <= theirs.abs().max() * (2**-8 if kind != "q4_1" else 1e-6)


def test_columns_that_count_are_nearer() -> None:
    x, importance = values(), torch.ones(576)
    importance[::7] = 50.0
    form = mixed("n", 3, 32, 576)
    plain, weighted = (form.decode(encode_blocks(form, x, w)) - x for w in (None, importance))
    assert (weighted.square() * importance).sum() < 0.9 * (plain.square() * importance).sum()


def test_what_cannot_be_encoded_and_what_is_zero() -> None:
    with pytest.raises(Misfit, match="a format of files"):
        fit_blocks(GGML_FORMATS["mxfp4"], values())
    for name in NAMES:
        assert not find_format(name).rounded(torch.zeros(2, 192)).any()
