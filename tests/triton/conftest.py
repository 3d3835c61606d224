"""Makes tests/triton/interpreting.py and tests/step_making.py importable; a GPU engine that many tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

for _folder in (Path(__file__).parents[1], Path(__file__).parent):
    sys.path.insert(0, str(_folder))

if os.environ.get("ICC_ON_GPU"):
    import on_gpu

    on_gpu.install()
elif os.environ.get("ICC_ON_PTX"):
    import on_ptx

    on_ptx.install(os.environ["ICC_ON_PTX"])


@pytest.fixture(scope="session")
def on_disk(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A GPU engine of one layer; see `fake_cuda.OnDisk`."""
    from building import build
    from fake_cuda import OnDisk
    from icc.runtime.format.manifest import Limits

    model = tmp_path_factory.mktemp("model")
    config = tiny.tiny_configs()["llama"]
    config.num_hidden_layers = 1  # the interpreter is slow
    tiny.save_tiny(config, model)
    built = build(model, "rtn4", Limits(max_seq_len=48, max_batch_size=4, max_step_tokens=16))
    return OnDisk(built.engine(), built, built.objects())
