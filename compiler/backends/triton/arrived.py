"""Makes barriers of AMD kernels wait until stores have completed.

`tl.debug_barrier` holds all waves of a program together, but on AMD a wave passes it while its own stores are in
flight, and the release of a following atomic waits only for the stores of the wave that runs it (LLVM's AMDGPU memory
model; llvm #160501, triton #9287). Another program could read sums that are not yet written. NVIDIA's barrier is a
memory barrier, too.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ...targets import Target
from .spec import LaunchSpec

_BARRIER = re.compile(r"^( *)tl\.debug_barrier\(\)", re.M)


def arrived(spec: LaunchSpec, target: Target) -> LaunchSpec:
    """The spec with a wait for its stores before each barrier; unchanged for GPUs that are not AMD's."""
    if target.backend != "hip" or not _BARRIER.search(spec.source):
        return spec
    asm = f'"{_wait(target.arch)}\\\\n\\\\tv_mov_b32 $0, $1", "=v,v", [tl.program_id(0)]'
    call = rf"\1if not INTERPRETED:\n\1    tl.inline_asm_elementwise({asm}, dtype=tl.int32, is_pure=False, pack=1)\n"
    return replace(spec, source=_BARRIER.sub(rf"{call}\g<0>", spec.source))


def _wait(arch: str) -> str:
    """The instruction that waits for stores: up to gfx9 they are counted with loads (AMD's ISA guides)."""
    generation = int(arch[3:-2])
    if generation >= 12:
        return "s_wait_storecnt 0x0"
    return "s_waitcnt_vscnt null, 0x0" if generation >= 10 else "s_waitcnt vmcnt(0)"
