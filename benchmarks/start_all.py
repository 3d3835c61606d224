"""Does every script here still start? Each runs on tiny inputs, or prints its help if it needs a GPU or a peer.

    python benchmarks/start_all.py [PART-OF-A-NAME ...]

A new script is run with `--help` automatically, until SMALL has arguments for it. Scripts run in processes that are
forked from this one after torch and transformers are imported. Exit code 1 if one fails, takes more than LIMIT seconds,
or needs a package that is not one of PEERS. Nothing is written outside a temporary directory.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SAMPLE = str(ROOT / "samples" / "pystd")
LIMIT = 150  # seconds
# packages that only the environments of peers have
PEERS = (
    "llama_cpp", "openvino", "openvino_genai", "onnxruntime_genai", "optimum", "bitsandbytes", "lm_eval", "instructor",
    "langchain_openai", "langchain_anthropic", "langchain_core", "litellm", "llama_index", "pydantic_ai", "matplotlib",
    "ray",
)  # fmt: skip
LIBRARIES = "no command"  # modules that others import; here they are only imported
# the arguments of each script; {engine}, {dir}, {text} and {model} are the sample's engine, an empty directory, a text
# file and the sample checkpoint; LIBRARIES for modules that are only imported
SMALL: dict[str, str] = {
    "adapter_traffic.py": "{engine} --adapters 4 --requests 6 --rank 4 --tokens 4 --rounds 1",
    "adapter_cost.py": "{engine} --batch 1,2 --adapters 3 --rank 4 --tokens 8 --rounds 1",
    "adapters_llamacpp.py": "--work {dir} --engine {engine} --model {model} --batch 1,2 --tokens 8 --rounds 1",
    "cpu/barriers.py": "{engine} --rounds 100",
    "calibration.py": "{model} --quant gptq4 --calib-sequences 1 --keep {dir}",
    "compile_memory.py": "{model} -- --target native --quant rtn4 --force",
    "clusters/faults.py": "{engine} --nodes 1 --streams 1 --tokens 4 --seconds 1 --scenarios engine",
    "clusters/overhead.py": "--help",
    "clusters/servers.py": LIBRARIES,
    "cpu/bench.py": "{dir}/bench.json --rounds 1 --out {dir}/cpu",
    "cpu/limits.py": LIBRARIES,
    "cpu/mixed.py": "{engine} --chunk 16 --decodes 2 --context 16 --rounds 1",
    "cpu/stages.py": "{engine} --isa {isa} --batch 1 --context 16 --chunk 16 --runs 1",
    "cpu/workers.py": LIBRARIES,
    "delta_rank.py": "{model} --text {text} --steps 1 --windows 1",
    "families.py": "llama --jobs 1 --out {dir}/families",
    "family_variants.py": "llama --cases 1",
    "format_kernels.py": LIBRARIES,
    "format_writers.py": LIBRARIES,
    "frontier.py": "{model} --text {text} --work {dir} --quant rtn4 --windows 1 --out {dir}/frontier",
    "frontier_peers.py": LIBRARIES,
    "frontier_text.py": "{dir}/docs.txt",
    "gpu_equality.py": "--only mistral-odd --out {dir}/equality.md",
    "gpu_matrix.py": "--minutes 0 --out {dir}/matrix",
    "identity.py": "check pystd/h100/none",
    "perplexity.py": "--quant rtn4 --tokens 600",
    "rank_families.py": "llama --out {dir}/rank_families.md",
    "rank_sums.py": LIBRARIES,
    "ranks.py": "{engine} {engine} --prompt 8 --tokens 4 --rounds 1 --sums",
    "llamacpp_adapter.py": LIBRARIES,
    "record_bitsandbytes.py": LIBRARIES,
    "record_hqq.py": LIBRARIES,
    "record_mlx.py": LIBRARIES,
    "record_loftq.py": LIBRARIES,
    "clients/run.py": LIBRARIES,
    "clients/scripted.py": LIBRARIES,
    "environments.py": LIBRARIES,
    "routers/indexer.py": LIBRARIES,
    "routers/proxies.py": LIBRARIES,
    "routers/servers.py": LIBRARIES,
    "sensitivity.py": "{model} --every 12 --tokens 64 --calib-sequences 4",
    "serve/replicas.py": "{engine} --chats 2 --turns 2 --system 8 --said 4 --answer 2 --pause 0.1 --rounds 1",
    "serve/creep.py": "{engine} --minutes 0 --round 0.2",
    "serve/limits.py": "{engine} --seconds 1 --attacks 3 --loads 1",
    "serve/slopes.py": LIBRARIES,
    "sparsity.py": "{model} --calib-sequences 1 --tokens 64 --window 32",
    "spec_cost.py": "{engine} --drafters ngram --tokens 16 --seconds 2 --threads 1",
    "spec_prompts.py": "heldout",
    "spec_replay.py": "{engine} --tokens 24 --rounds 1 --context 16 --guesses 3 --threads 1",
    "watermarks.py": "{engine} --texts 2 --tokens 8",
}


def scripts() -> list[str]:
    """Every tracked Python file of this folder except this one, relative to it."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=HERE, capture_output=True, text=True)
    found = listed.stdout.split() or [str(path.relative_to(HERE)) for path in HERE.rglob("*.py")]  # outside git
    return sorted(name for name in found if name != Path(__file__).name)


def bench_config(engine: str) -> str:
    """A configuration for cpu/bench.py in which icc is its own peer."""
    import json

    spec = {"python": sys.executable, "kind": "icc", "model": engine, "batch": 2, "length": 64}
    row = {"engines": ["icc", "icc again"], "batch": 1, "context": 16, "steps": 4, "peak": "int8", "goal": "1.0"}
    rows = [row | {"name": "decode", "what": "decode"}, row | {"name": "prefill", "what": "prefill"}]
    return json.dumps({"engines": {"icc": spec, "icc again": spec}, "rows": rows})


def run(script: str, arguments: list[str], log: Path) -> int:
    """Run one script in a fork of this process, its output in `log`; its exit code, or 124 if it took too long."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.setpgid(0, 0)
            sys.argv = [str(HERE / script), *arguments]
            sys.path.insert(0, str((HERE / script).parent))
            # After a fork torch makes a new thread pool on first use, and fails if two threads use it first at the
            # same time ("Invalid thread pool"), as when transformers loads a model.
            sys.modules["torch"].set_num_threads(1)
            _run_file(sys.argv[0], "imported" if arguments == [LIBRARIES] else "__main__")
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def late(number: int, frame: FrameType | None) -> None:
        os.killpg(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    code = os.waitstatus_to_exitcode(status)
    return 124 if code == -signal.SIGKILL else code


def _run_file(path: str, name: str) -> None:
    """Run a script in this process as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def needs(text: str) -> str:
    """The package of PEERS whose absence ended a script with the output `text`; "" if there is none."""
    last = text.strip().splitlines()[-1:] or [""]
    name = last[0].partition("No module named ")[2].strip("'\"").split(".")[0]
    return name if name in PEERS else ""


def commands(folder: Path, engine: str) -> dict[str, list[str]]:
    """The arguments of every script, by name; its files go to `folder`."""
    from icc.compiler.backends.cpu.isa import host_isas

    (folder / "text.txt").write_text("def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n" * 60)
    places = {
        "engine": engine, "text": str(folder / "text.txt"), "model": SAMPLE, "isa": host_isas()[0].name,
    }  # fmt: skip
    found: dict[str, list[str]] = {}
    for script in scripts():
        own = folder / script.replace("/", "-").removesuffix(".py")
        own.mkdir()
        (own / "bench.json").write_text(bench_config(engine))
        is_command = "__main__" in (HERE / script).read_text()
        said = SMALL.get(script, "--help" if is_command else LIBRARIES)
        found[script] = [said] if said == LIBRARIES else said.format(dir=own, **places).split()
    return found


def main(parts: list[str]) -> int:
    """Run all scripts, or those whose names contain one of `parts`, and print a line each; the exit code."""
    os.environ["TRITON_INTERPRET"] = "1"
    import icc
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "tests"))
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="icc-start-") as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        engine = str(
            icc.compile(
                SAMPLE, folder / "pystd.engine", target="native", quant="rtn4", max_seq_len=512, adapters="2x16"
            )
        )
        for script, arguments in commands(folder, engine).items():
            if parts and not any(part in script for part in parts):
                continue
            began, log = time.monotonic(), folder / "log.txt"
            code = run(script, arguments, log)
            text = log.read_text(errors="replace")
            peer = needs(text) if code else ""
            how = "imported" if arguments == [LIBRARIES] else " ".join(arguments).replace(name, "")
            verdict = f"needs {peer}" if peer else "ok" if code == 0 else f"FAILED ({code})"
            print(f"{verdict:>12}  {script} {how}  {time.monotonic() - began:.1f} s", flush=True)
            if code and not peer:
                failed[script] = "\n".join(text.strip().splitlines()[-15:])
                print(failed[script], flush=True)
    print(
        f"{len(failed)} failed"
        + "".join(f"\n  {script}: {said.rpartition(chr(10))[2]}" for script, said in failed.items())
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
