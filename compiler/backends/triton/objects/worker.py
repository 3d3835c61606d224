"""A process that compiles Triton kernels: one JSON job per line in, one JSON answer per line out.

Run as a script, without icc on its path and without TRITON_INTERPRET: Triton decides at import time whether it
interprets, and it keeps state, so compiling happens apart from the compiler's own process.

A job: {source, entry, signature, aligned, backend, arch, warp_size, num_warps, num_stages, max_registers, object, ir,
plain, assembly}.
`source` is the path of the rendered Python file, `object` that of the file to write, `ir` that of Triton's IR with
layouts, `plain` that of the IR without, and `assembly` that of AMD's. An answer: {entry, shared, registers, spill,
driver} or {error}.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any


def compile_job(job: dict[str, Any]) -> dict[str, Any]:
    """Compile one kernel and write its object; returns the resources that the object needs, in bytes and registers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    spec = importlib.util.spec_from_file_location(Path(job["source"]).stem, job["source"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    attrs = {(i,): [["tt.divisibility", 16]] for i in job["aligned"]}
    source = ASTSource(getattr(module, job["entry"]), job["signature"], constexprs={}, attrs=attrs)
    arch = int(job["arch"]) if job["backend"] == "cuda" else job["arch"]
    target = GPUTarget(job["backend"], arch, job["warp_size"])
    options = {"num_warps": job["num_warps"], "num_stages": job["num_stages"]}
    if job["max_registers"]:  # what other programs leave of the register file
        return _finish(triton.compile(source, target=target, options={**options, "maxnreg": job["max_registers"]}), job)
    answer = _finish(triton.compile(source, target=target, options=options), job)
    for more in (16, 64, 255):  # ptxas would spill a few registers to let one more block reside
        if job["backend"] != "cuda" or not answer.get("spill"):
            break
        most = min(answer["registers"] + more, 255, 65536 // (32 * job["num_warps"]))
        answer = _finish(triton.compile(source, target=target, options={**options, "maxnreg": most}), job)
    return answer


def _finish(kernel: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Write a kernel's object and return the resources that it needs."""
    meta = kernel.metadata
    if (getattr(meta, "tmem_size", 0) or 0) > 512:  # Triton would compile it to a trap
        return {"error": f"needs {meta.tmem_size} columns of tensor memory, there are 512"}
    scratch = max(getattr(meta, "global_scratch_size", 0) or 0, getattr(meta, "profile_scratch_size", 0) or 0)
    if scratch or meta.num_ctas != 1:
        return {"error": f"needs {scratch} bytes of global scratch and {meta.num_ctas} CTAs per cluster"}
    binary = Path(job["object"])
    binary.write_bytes(kernel.asm["cubin" if job["backend"] == "cuda" else "hsaco"])
    Path(job["ir"]).write_text(kernel.asm["ttgir"])
    Path(job["plain"]).write_text(kernel.asm["ttir"])
    if job["backend"] == "cuda":
        found = cubin_resources(binary) | {"driver": driver_version(int(job["arch"]))}
    else:
        Path(job["assembly"]).write_text(kernel.asm["amdgcn"])
        found = hsaco_resources(kernel.asm["amdgcn"]) | {"driver": 0}
    return {"entry": meta.name, "shared": meta.shared, **found}


def driver_version(arch: int) -> int:
    """The least CUDA version of a driver that loads a cubin of the ptxas that made it.

    Drivers load cubins of every toolkit of their own major version (CUDA "minor version compatibility"); sm_100 came
    with 12.8.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    tool: Any = get_ptxas(arch)
    text = subprocess.run([tool.path, "--version"], capture_output=True, text=True, check=True).stdout
    major = int(re.search(r"release (\d+)\.", text)[1])  # type: ignore[index]
    return max(1000 * major, 12080 if arch >= 100 else 11080)


def cubin_resources(cubin: Path) -> dict[str, int]:
    """Registers per thread and bytes of local memory per thread, as cuobjdump reads them from the ELF."""
    import triton.backends.nvidia as nvidia

    tool = Path(next(iter(nvidia.__path__))) / "bin" / "cuobjdump"
    text = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"\b{key}:(\d+)", text)[1]) for key in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    return {"registers": registers, "spill": stack + local}


def hsaco_resources(assembly: str) -> dict[str, int]:
    """Vector registers per lane and bytes of scratch per lane, from the metadata of the assembly."""
    registers = int(re.search(r"\.vgpr_count:\s+(\d+)", assembly)[1])  # type: ignore[index]
    spill = int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", assembly)[1])  # type: ignore[index]
    return {"registers": registers, "spill": spill}


def main() -> None:
    """Answer jobs until the input ends; what the compilers print goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            answer = compile_job(json.loads(line))
        except Exception as error:  # a failure of Triton, LLVM or ptxas affects only this kernel
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
