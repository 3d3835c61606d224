"""`icc run MODEL`: compiled once into a cache, from a directory or from the hub; and `icc cache`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from icc.compiler import identity
from icc.compiler.cache import ondemand, store
from icc.compiler.cache.ondemand import CachedEngine, engine_of
from icc.compiler.cli import main
from icc.compiler.commands.on_demand import with_models
from icc.compiler.options import CompileOptions
from icc.compiler.progress import Reporter
from icc.runtime.cli.commands import COMMANDS
from icc.runtime.errors import MissingExtraError

SAMPLE = Path(__file__).parents[2] / "samples" / "pystd"
IDS = ("--ids", "1,5,9", "--max-tokens", "4", "--threads", "1", "--json")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "icc" / "engines"


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[CompileOptions]:
    """The options of all compiles, which are replaced by ones that write almost nothing."""
    from icc.compiler import driver

    made: list[CompileOptions] = []

    def write(options: CompileOptions, reporter: Reporter) -> None:
        time.sleep(0.2)  # long enough that a second compile finds the first one running
        options.output.mkdir()
        (options.output / "engine.json").write_text("{}")
        made.append(options)

    monkeypatch.setattr(driver, "compile_engine", write)
    return made


def ask(model: Path = SAMPLE, **options: Any) -> CachedEngine:
    return engine_of(CompileOptions(model=model, output=Path(), target="native", **options), Reporter)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def fake_hub() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fake_hub", Path(__file__).with_name("fake_hub.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_checkpoint_runs_as_its_engine_does(compiled: Callable[..., Any], cache: Path) -> None:
    found = compiled("llama", quant="rtn4")
    truth = json.loads(run("run", found.engine, *IDS).stdout)
    first = run("run", found.checkpoint, "--quant", "rtn4", *IDS)
    assert first.exit_code == 0, first.output
    assert "no tokenizer.json" in first.stderr and "icc cache list" in first.stderr
    [entry] = store.entries()
    assert entry.facts is not None and entry.facts.options == {"quant": "rtn4", "target": "native"}
    again = run("run", found.checkpoint, "--quant", "rtn4", *IDS)
    assert "kernels" not in again.stderr
    for result in (first, again):
        assert json.loads(result.stdout)["token_ids"] == truth["token_ids"]
    unused = run("run", found.engine, "--quant", "rtn4", *IDS)
    assert unused.exit_code == 2 and "--quant is for a MODEL" in unused.stderr


@pytest.mark.parametrize("name", ["run", "chat", "serve"])
def test_every_command_of_a_model_compiles_it_once(
    name: str, cache: Path, compiles: list[CompileOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands are replaced by ones that record the engine's path."""
    command, given = COMMANDS[name].load(), []
    monkeypatch.setattr(command, "callback", lambda engine, **parameters: given.append(engine))
    for _ in range(2):
        done = CliRunner().invoke(with_models(name, command), [str(SAMPLE), "--quant", "rtn4"])
        assert done.exit_code == 0, done.output
    assert [options.quant for options in compiles] == ["rtn4"]
    assert given == [str(compiles[0].output)] * 2


def test_two_who_want_the_same_get_one_compile(cache: Path, compiles: list[CompileOptions]) -> None:
    found: list[CachedEngine] = []
    threads = [threading.Thread(target=lambda: found.append(ask())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiles) == 1 and sorted(engine.compiled for engine in found) == [False, True]
    assert {engine.path for engine in found} == {compiles[0].output}
    assert ask(max_seq_len=16).compiled, "other options are another engine"


def test_what_the_key_depends_on(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(10))
    (tmp_path / "text").write_text("a")
    options = CompileOptions(model=model, output=tmp_path / "e", quant="awq4", calib=tmp_path / "text")
    keys = [identity.engine_key(options)]

    def changes() -> None:
        keys.append(identity.engine_key(options))
        assert len(set(keys)) == len(keys)

    assert identity.engine_key(CompileOptions(model, tmp_path / "f", quant="awq4", calib=options.calib)) == keys[0]
    (model / "model.safetensors").write_bytes(bytes(11))
    changes()
    (model / "tokenizer.json").write_text("{}")
    changes()
    (tmp_path / "text").write_text("b")
    changes()
    monkeypatch.setattr(identity, "sources_digest", lambda: "another icc")
    changes()
    monkeypatch.setattr(identity, "_SMALL", 4)  # now every file counts by its path and time
    changes()
    os.utime(model / "model.safetensors", (1, 1))
    changes()


def test_a_compile_that_fails_leaves_nothing_that_runs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from icc.compiler import driver

    def fail(options: CompileOptions, reporter: Reporter) -> None:
        options.output.mkdir()
        raise MemoryError

    monkeypatch.setattr(driver, "compile_engine", fail)
    with pytest.raises(MemoryError):
        ask()
    [entry] = store.entries()
    assert entry.facts is None
    assert run("cache", "prune").exit_code == 0 and store.entries() == []


def test_list_and_prune(cache: Path, compiles: list[CompileOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = ask(), ask(quant="rtn4")
    day = 86400
    os.utime(old.cell.path / "entry.json", (time.time() - 9 * day,) * 2)
    rows = json.loads(run("cache", "list", "--json").stdout)
    assert [row["options"].get("quant") for row in rows] == ["rtn4", None], "last used first"
    assert rows[1]["unused_s"] >= 9 * day and not rows[1]["stale"] and rows[0]["bytes"] > 0
    shown = run("cache", "list").stdout
    assert "2 engines" in shown and "9 d" in shown

    assert "in use, kept" in run("cache", "prune", "--older-than", "8d").stdout
    old.cell.close()
    assert run("cache", "prune", "--older-than", "10d").stdout.splitlines() == ["freed 0 B"]
    assert "would remove" in run("cache", "prune", "--older-than", "1w", "--dry-run").stdout
    assert len(store.entries()) == 2
    assert re.search(r"^removed \w+", run("cache", "prune", "--older-than", "1w").stdout)
    assert [entry.path for entry in store.entries()] == [new.cell.path]
    new.cell.close()
    assert run("cache", "prune").stdout == "freed 0 B\n", "what can still be used stays"
    monkeypatch.setattr("icc.compiler.commands.cache.sources_digest", lambda: "another icc")
    assert "of another" in run("cache", "list").stdout
    run("cache", "prune")
    assert store.entries() == []
    wrong = run("cache", "prune", "--older-than", "yesterday")
    assert wrong.exit_code == 2 and "12h" in wrong.output


def test_without_a_compiler_only_what_is_compiled_runs(
    cache: Path, compiles: list[CompileOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask().cell.close()
    monkeypatch.setattr(ondemand, "lacking_module", lambda: "torch")
    assert not ask().compiled
    with pytest.raises(MissingExtraError, match=r"not compiled yet.*torch"):
        ask(quant="rtn4")


def test_a_model_of_the_hub(cache: Path, tmp_path: Path) -> None:
    """Only config.json is fetched for a refusal and a plan, then the files that a compile reads; without a hub all come
    from the cache."""
    files = {p.name: p.read_bytes() for p in SAMPLE.iterdir() if p.is_file()} | {"pytorch_model.bin": b"never"}
    encoder = {"config.json": b'{"model_type": "bert"}', "model.safetensors": b""}
    gguf = {"tiny.gguf": b"GGUF"}
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from icc.compiler.frontend.source import hub\n"
        "from icc.compiler.request import check, find_model\n"
        "from icc.compiler.options import CompileOptions, default_output\n"
        "from icc.runtime.errors import IccError\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        model = Path(name)\n"
        "        print(check(CompileOptions(model=model, output=default_output(model))).options.model)\n"
        "    except IccError as error:\n"
        "        print(error.exit_code, error.message)\n"
        "print('torch' in sys.modules)\n"
    )

    def say(address: str, *names: str, **more: str) -> list[str]:
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), **more}
        done = subprocess.run(
            [sys.executable, "-c", code, *names], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        *lines, torch = done.stdout.splitlines()
        assert torch == "False"
        return lines

    with fake_hub().serving({"org/tiny": files, "org/bert": encoder, "org/gguf": gguf}) as hub:
        refused = say(hub.address, "org/bert", "org/gguf", "org/none")
        assert refused[0].startswith("12 ") and "bidirectional encoder" in refused[0]
        assert refused[1].startswith("12 ") and "GGUF" in refused[1]
        assert refused[2].startswith("40 ") and "neither a directory here nor a model" in refused[2]
        assert not any(path.endswith("model.safetensors") for path in hub.asked), "nothing large for a refusal"
        [place] = say(hub.address, "org/tiny")
        assert (Path(place) / "model.safetensors").read_bytes() == files["model.safetensors"]
        assert (Path(place) / "tokenizer.json").is_file() and not (Path(place) / "pytorch_model.bin").exists()
    start = time.monotonic()
    assert say(hub.address, "org/tiny") == [place], "from the cache, though the hub is gone"
    assert say(hub.address, "org/tiny", HF_HUB_OFFLINE="1") == [place]
    [gone] = say(hub.address, "org/other")
    assert gone.startswith("40 ") and "cannot be reached" in gone and time.monotonic() - start < 300
