"""A process that takes jobs as objects/worker.py does, but stops at Triton's IR without layouts and answers with it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "compiler" / "backends" / "triton" / "objects"))
import worker  # type: ignore[import-not-found]


def _plain(job: dict[str, Any]) -> dict[str, Any]:
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    spec = importlib.util.spec_from_file_location(Path(job["source"]).stem, job["source"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    attrs = {(i,): [["tt.divisibility", 16]] for i in job["aligned"]}
    source = ASTSource(getattr(module, job["entry"]), job["signature"], constexprs={}, attrs=attrs)
    target = GPUTarget(job["backend"], int(job["arch"]), job["warp_size"])
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": job["num_warps"], "num_stages": job["num_stages"]})
    context, stages = ir.context(), dict[str, Any]()
    ir.load_dialects(context)
    backend.load_dialects(context)
    made = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    backend.add_stages(stages, options, source.language)
    Path(job["plain"]).write_text(str(stages["ttir"](made, {})))
    for name in ("object", "ir"):
        Path(job[name]).write_text("")
    return {"entry": job["entry"], "shared": 0, "registers": 0, "spill": 0, "driver": 0}


worker.compile_job = _plain
worker.main()
