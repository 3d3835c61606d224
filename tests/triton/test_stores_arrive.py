"""On AMD, a program's stores complete before other programs are notified: waits before barriers, and their check."""

from __future__ import annotations

from pathlib import Path

import pytest
from icc.compiler.backends.errors import KernelRefused
from icc.compiler.backends.triton.arrived import arrived
from icc.compiler.backends.triton.objects.amdgcn import unfinished_stores
from icc.compiler.backends.triton.objects.compile import compile_specs
from icc.compiler.backends.triton.spec import LaunchSpec, Shape
from icc.compiler.backends.triton.tiling.choice import Config
from icc.compiler.targets import TARGETS
from test_linear_objects import LIMITS, Forced, product

SPLIT: Config = {"decode": 0, "m": 16, "n": 32, "k": 64, "warps": 4, "stages": 2, "splits": 2}
MI300X = TARGETS["mi300x"]


def of_sixteen_rows(config: Config, target: str) -> LaunchSpec:
    return product("o", "bf16").launches(Shape(16, False), LIMITS, Forced(config, target))[0]


def test_a_split_product_waits_for_its_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its wait, the object passes the check of every compile; without the wait it is refused."""
    monkeypatch.setenv("ICC_CACHE_DIR", str(tmp_path))
    spec = of_sixteen_rows(SPLIT, "mi300x")
    waiting = arrived(spec, MI300X)
    assert spec.source.count("tl.debug_barrier()") == waiting.source.count("s_waitcnt vmcnt(0)") == 1
    assert compile_specs([waiting], MI300X)
    with pytest.raises(KernelRefused, match="do not wait for what was stored"):
        compile_specs([spec], MI300X)


@pytest.mark.parametrize(
    ("target", "wait"), [("rx7900xtx", "s_waitcnt_vscnt null, 0x0"), ("rx9070xt", "s_wait_storecnt 0x0")]
)
def test_later_generations_count_stores_apart(target: str, wait: str) -> None:
    """The compiler for these targets also waits before a barrier by itself."""
    spec = of_sixteen_rows(SPLIT, target)
    assert arrived(spec, TARGETS[target]).source.count(wait) == 1


def test_kernels_of_other_makers_and_without_barriers_stay() -> None:
    spec = of_sixteen_rows(SPLIT, "h100")
    assert arrived(spec, TARGETS["h100"]) is spec
    plain = of_sixteen_rows({**SPLIT, "splits": 1}, "mi300x")
    assert arrived(plain, MI300X) is plain


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["global_store_dword v0", "s_barrier", "global_atomic_add v1"], (2,)),
        (["global_store_dword v0", "s_waitcnt vmcnt(0)", "s_barrier", "global_atomic_add v1"], ()),
        (["global_store_dword v0", "s_waitcnt lgkmcnt(0)", "s_barrier", "buffer_atomic_add v1"], (3,)),
        (["global_store_dword v0", "s_waitcnt vmcnt(1)", "s_barrier", "flat_atomic_add v1"], (3,)),
        (["s_waitcnt vmcnt(0) lgkmcnt(0)", "buffer_store_short v0", "s_barrier", "s_waitcnt vmcnt(0)",
          "global_atomic_add v1"], (3,)),
        (["global_store_b32 v0", "s_waitcnt_vscnt null, 0x0", "s_barrier", "global_atomic_add_u32 v1"], ()),
        (["global_store_b32 v0", "s_wait_storecnt 0x0", "s_barrier_signal -1", "s_barrier_wait -1",
          "global_atomic_add_u32 v1"], ()),
        (["global_store_b32 v0", "s_wait_loadcnt 0x0", "s_barrier_signal -1", "s_barrier_wait -1",
          "global_atomic_add_u32 v1"], (3,)),
        (["global_store_dword v0", "s_barrier", "s_endpgm"], ()),
    ],
)  # fmt: skip
def test_a_barrier_that_does_not_wait_is_found(lines: list[str], found: tuple[int, ...]) -> None:
    assert unfinished_stores("\n".join(f"\t{line} ; comment" for line in lines)) == found
