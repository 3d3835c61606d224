"""Damaged or malicious adapters are refused in one line, wherever they are given, and harm nothing else."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import pytest
from hostile import ADAPTERS, configured, tensors
from icc.compiler.driver import compile_engine
from icc.compiler.options import CompileOptions
from icc.compiler.progress import Reporter
from icc.runtime.errors import AdapterError, IccError
from peft_models import save_adapter
from test_serving import IDS, expected, folder, path, server  # noqa: F401 -- fixtures

# the refusals of all other adapters come before there is a graph
COMPILED = ("a list", "a device", "a layer that is not there", "another width")


@pytest.fixture(scope="module")
def damaged(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directories of all ADAPTERS, by their names."""
    root = tmp_path_factory.mktemp("hostile")
    good = save_adapter(model("llama"), root / "good", r=4, target_modules=["q_proj"])
    found: dict[str, Path] = {}
    for number, (case, (damage, _)) in enumerate(ADAPTERS.items()):
        found[case] = Path(shutil.copytree(good, root / str(number)))
        damage(found[case])
    return found


def is_one_line(case: str, told: str) -> bool:
    """Whether the message names the fault of the adapter in one line, and shows nothing of another file of the
    machine."""
    return bool(re.search(ADAPTERS[case][1], told)) and not re.search(r"\n|root:", told) and len(told) < 2000


@pytest.mark.parametrize("case", COMPILED)
def test_compiling(case: str, damaged: dict[str, Path], model: Callable[[str], Path], tmp_path: Path) -> None:
    options = CompileOptions(model("llama"), tmp_path / "engine", "native", lora=damaged[case], max_seq_len=64)
    with pytest.raises(AdapterError, match=ADAPTERS[case][1]) as error:
        compile_engine(options, Reporter())
    assert "\n" not in error.value.message and list(tmp_path.iterdir()) == []


def test_loading(path: Path, damaged: dict[str, Path]) -> None:  # noqa: F811
    with icc.load(path) as llm:
        before = llm.logits(IDS)
        told: dict[str, str] = {}
        for case in ADAPTERS:
            with pytest.raises(IccError) as error:
                llm.load_adapter("x", damaged[case])
            told[case] = error.value.message
        assert not {case: line for case, line in told.items() if not is_one_line(case, line)}
        assert llm.adapters is not None and llm.adapters.names == []
        assert (llm.logits(IDS) == before).all()


def test_a_server(server: Any, expected: dict[str, list[float]], damaged: dict[str, Path]) -> None:  # noqa: F811
    """The server answers with the same numbers while it refuses all of them, and its engine process stays the same."""
    ask, process = server
    body = {"model": "base", "prompt": IDS, "max_tokens": 6, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    children = {child.pid for child in process.children(recursive=True)}
    answers: list[list[float]] = []
    end = threading.Event()

    def go_on() -> None:
        while not end.is_set():
            status, found = ask("/v1/completions", body)
            answers.append(found["choices"][0]["logprobs"]["token_logprobs"] if status == 200 else [])

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        told: dict[str, tuple[int, str]] = {}
        for case in ADAPTERS:
            status, found = ask("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(damaged[case])})
            told[case] = status, found["error"]["message"]
        assert not {
            case: told[case] for case in ADAPTERS if told[case][0] != 400 or not is_one_line(case, told[case][1])
        }
    finally:
        end.set()
        thread.join()
    assert len(answers) > 3 and all(answer == pytest.approx(expected["base"], abs=0) for answer in answers)
    assert {child.pid for child in process.children(recursive=True)} == children
    assert [one["id"] for one in ask("/v1/models")[1]["data"]] == ["base", "one"]


def test_values_that_overflow_are_their_own_request_s(
    path: Path,  # noqa: F811
    model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Finite values whose products are not finite spoil requests with the adapter only; others in the same steps get
    their answers."""
    adapter = save_adapter(model("llama"), tmp_path / "adapter", r=4, target_modules=["q_proj"])
    tensors(lambda found: [value.fill_(1e38) for value in found.values()])(adapter)
    configured(lora_alpha=4)(adapter)
    params = icc.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with icc.load(path) as llm:
        alone = llm.generate([IDS], params)[0].token_ids
        llm.load_adapter("x", adapter)
        found = llm.generate([IDS, IDS], params, adapter=["x", None])
    assert found[1].token_ids == alone
