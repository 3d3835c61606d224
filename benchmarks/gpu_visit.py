"""One visit of a machine with an NVIDIA GPU: all checks that need a GPU, the most valuable first, within --minutes.

    python benchmarks/gpu_visit.py --minutes 25 [--target h200] [--only answers,kernels] [--list]

Each part runs in its own processes, under a limit of seconds (less if less time is left), and begins if 30 seconds or
its limit are left. Its output goes to WORK/NAME.log; all results go to WORK/visit.json and, as a table with the last
lines of each part, to OUT (benchmarks/results/gpu-visit-TARGET.md), both written after each part. A part that passed is
not run again, so that an interrupted visit continues where it stopped; parts that failed are run again, and --again
runs all. Nothing is downloaded: torch, Triton and Python are the machine's.

    python benchmarks/gpu_visit.py --target h200 --prepare build/visit-objects

compiles, without a GPU, the kernels of the engines that are timed; with ICC_CARRIED_OBJECTS=build/visit-objects the
visit uses these, so that it times the objects of this machine's Triton, whatever the GPU machine's version is. With
--before FILE, the JSON of an earlier visit (WORK/visit.json, or OUT.json), figures that became slower by more than the
noise and answers that changed are listed in the table and at the end. The status is the number of parts that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from visit_figures import compared
from visit_figures import found as figures_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TAIL = 60  # lines of a part's output in the table


@dataclass(frozen=True)
class Part:
    """Commands, and the seconds after which they are killed. In commands {python}, {target}, {work} and {here} are the
    interpreter, the target, the folder of engines and results, and benchmarks/. answers: what the part finds out.
    needs: a program without which the part is left out."""

    name: str
    answers: str
    seconds: int
    commands: tuple[str, ...]
    needs: str = ""


@dataclass
class Outcome:
    """How a part ended: "passed", "failed", "late" (killed at its limit) or "left out"; its last lines, and its figures
    and answers (visit_figures.py)."""

    status: str
    seconds: float
    tail: list[str]
    figures: dict[str, float] = field(default_factory=dict)
    answers: dict[str, bool] = field(default_factory=dict)


_GPU_TEST = "{python} -m pytest -q -p no:cacheprovider --no-header"
_FRESH = " ".join(
    f"{ROOT}/tests/triton/test_{name}.py"
    for name in ("adapters", "changes", "micro_rows", "coded_rows", "few_rows", "product_norms", "states", "bmm")
)
_FRESH += f" {ROOT}/tests/triton/test_expert_linear.py"
PARTS = (
    Part("limits", "the rates of reads, copies and products", 60, ("{python} {here}/gpu_visit.py --limits",)),
    Part(
        "answers", "the checks of gpu_check.py: logits, tokens, bits, seeds, memory", 240,
        ("{python} {here}/gpu_check.py --target {target} --work {work}/check --out {work}/gpu-check",),
    ),
    Part(
        "kernels", "kernels that the tests interpret, on the device", 150,
        (f"env ICC_ON_GPU=1 {_GPU_TEST} -n 8 {_FRESH}",),
    ),
    Part(
        "step", "a step of one sequence, four layers of 8B: launches, step kernels, 4 and 16 bits", 150,
        tuple(
            "{python} {here}/gpu_step.py --target {target} --shape llama-8b --layers 4 --work {work}/step --quant " + q
            for q in ("rtn4", "none")
        ),
    ),
    Part(
        "speed-8b", "tokens/s of eight layers of 8B with its head: 4, 16 and 8 bits", 240,
        ("{python} {here}/gpu.py --target {target} --shapes llama-8b-quarter --quants rtn4,none,fp8 --engines icc "
         "--rounds 2 --no-reference --work {work}/speed --out {work}/gpu-8b",),
    ),
    Part(
        "speed-1b", "tokens/s of 1B: 16, 4 and 8 bits", 180,
        ("{python} {here}/gpu.py --target {target} --shapes llama-1b --quants none,rtn4,fp8 --engines icc --rounds 2 "
         "--work {work}/speed --out {work}/gpu-1b",),
    ),
    Part(
        "adapters", "steps with adapters against steps without, 1B in 4 bits, rank 16", 150,
        ("{python} -m icc compile {work}/speed/llama-1b -o {work}/adapters.engine --target {target} --quant rtn4 "
         "--adapters 32x16 --max-seq-len 2048 --max-batch-size 32 --max-step-tokens 512 --force",
         "{python} {here}/adapter_cost.py {work}/adapters.engine --batch 1,16 --adapters 32 --rank 16 --rounds 3"),
    ),
    Part(
        "products", "each kernel of the 4-bit engine, beside what the cost model says", 90,
        ("{python} {here}/gpu_kernels.py {work}/speed/llama-8b-quarter-rtn4.engine --phases d1,d8,d64,d128,m512 "
         "--out {work}/gpu-kernels-8b",),
    ),
    Part(
        "eight", "products of 8-bit rows beside torch's", 90,
        ("{python} {here}/gpu_w8a8.py --target {target} --out {work}/gpu-w8a8.json",),
    ),
    Part(
        "attention", "prompts, decodes and latents beside cuDNN and flash", 90,
        ("{python} {here}/gpu_attention.py --target {target} --only latent,decode,prefill --seconds 45",),
    ),
    Part(
        "speculation", "what guesses cost and bring at 70 and 80 % acceptance", 90,
        ("{python} {here}/spec_replay.py {work}/speed/llama-8b-quarter-rtn4.engine --accept 0.7 --guesses 7",
         "{python} {here}/spec_replay.py {work}/speed/llama-8b-quarter-rtn4.engine --accept 0.8 --guesses 7"),
    ),
    Part(
        "memory", "attention kernels under compute-sanitizer", 120,
        (f"env ICC_ON_GPU=exact PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer {_GPU_TEST} "
         f"{ROOT}/tests/triton/test_attention.py -k 'types or narrower'",), needs="compute-sanitizer",
    ),
    Part(
        "idle", "how long the device waits for the host", 90,
        ("{python} {here}/gpu_idle.py --target {target} --engine {work}/speed/llama-8b-quarter-rtn4.engine",),
    ),
    Part("states", "recurrent layers: answers and times", 90, ("{python} {here}/gpu_states.py --target {target}",)),
    Part(
        "tune", "the fastest tilings of the 4-bit engine, for tuned/", 180,
        ("{python} -m icc tune {work}/speed/llama-8b-quarter-rtn4.engine",),
    ),
    Part(
        "peers", "transformers with a static cache and torch.compile", 240,
        ("{python} {here}/gpu.py --target {target} --shapes llama-1b --engines static --rounds 2 --work {work}/speed "
         "--out {work}/gpu-peers",),
    ),
)  # fmt: skip


class Visit:
    """The parts of a visit and their outcomes. work: the folder of the state, logs and engines; out: the table's file,
    beside which the state is also written. before: the parts of an earlier visit from its JSON, or None."""

    def __init__(
        self, parts: Sequence[Part], target: str, work: Path, out: Path, before: Mapping[str, Any] | None = None
    ) -> None:
        self._parts, self._target, self._work, self._out, self._before = parts, target, work, out, before
        self._state = work / "visit.json"
        self.outcomes: dict[str, Outcome] = {}
        if self._state.is_file():
            self.outcomes = {name: Outcome(**found) for name, found in json.loads(self._state.read_text()).items()}

    def run(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> int:
        """Run the parts that have not passed yet, within `seconds`; the number of parts that failed or were late."""
        self._work.mkdir(parents=True, exist_ok=True)
        end = clock() + seconds
        for part in self._parts:
            known = self.outcomes.get(part.name)
            if known is not None and known.status == "passed":
                continue
            left = end - clock()
            if left < min(part.seconds, 30):
                print(f"{part.name}: no time is left", flush=True)
                continue
            print(f"{part.name}: {part.answers} (at most {min(part.seconds, left):.0f} s)", flush=True)
            self.outcomes[part.name] = found = self._run(part, min(part.seconds, left))
            self._save()
            print(
                f"{part.name}: {found.status} after {found.seconds:.0f} s\n" + "\n".join(found.tail[-25:]), flush=True
            )
        if self._before is not None:
            print("beside the visit before:\n" + "\n".join(self.compared()), flush=True)
        return sum(found.status in ("failed", "late") for found in self.outcomes.values())

    def _run(self, part: Part, seconds: float) -> Outcome:
        if part.needs and shutil.which(part.needs) is None:
            return Outcome("left out", 0.0, [f"{part.needs} is not installed"])
        start, status = time.monotonic(), "passed"
        log, environment = self._work / f"{part.name}.log", _environment(self._work)
        names = {"python": sys.executable, "target": self._target, "work": str(self._work), "here": str(HERE)}
        with log.open("w") as output:
            for command in part.commands:
                words = [word.format(**names) for word in shlex.split(command)]
                status = _ended(words, output, start + seconds - time.monotonic(), environment)
                if status != "passed":
                    break
        text = log.read_text(errors="replace")
        found = figures_of(text, self._written(part, names))
        seconds = round(time.monotonic() - start, 1)
        return Outcome(status, seconds, text.splitlines()[-TAIL:], dict(found.figures), dict(found.answers))

    def _written(self, part: Part, names: Mapping[str, str]) -> Iterator[Path]:
        """The JSON files of figures that the commands of a part name with --out."""
        for command in part.commands:
            words = shlex.split(command)
            if "--out" in words:
                yield Path(words[words.index("--out") + 1].format(**names)).with_suffix(".json")

    def _save(self) -> None:
        text = json.dumps(self._state_now(), indent=1) + "\n"
        _replace(self._state, text)
        _replace(self._out.with_suffix(".json"), text)
        _replace(self._out, self.table())

    def _state_now(self) -> dict[str, Any]:
        return {name: asdict(found) for name, found in self.outcomes.items()}

    def compared(self) -> list[str]:
        """Lines that compare this visit with the one before."""
        return compared(self._state_now(), self._before or {})

    def table(self) -> str:
        """The Markdown table of all parts, and the last lines of each."""
        rows = [f"# A visit: {self._target}, {time.strftime('%Y-%m-%d')}\n", "Made by `benchmarks/gpu_visit.py`.\n"]
        rows += ["| part | what it answers | ended | seconds |", "|---|---|---|---|"]
        for part in self._parts:
            found = self.outcomes.get(part.name, Outcome("not run", 0.0, []))
            rows.append(f"| {part.name} | {part.answers} | {found.status} | {found.seconds:.0f} |")
        if self._before is not None:
            rows += ["\n## Beside the visit before\n", *(f"- {line}" for line in self.compared())]
        for part in self._parts:
            if lines := self.outcomes.get(part.name, Outcome("", 0.0, [])).tail:
                rows += [f"\n## {part.name}\n", "```", *lines, "```"]
        return "\n".join(rows) + "\n"


def _site(work: Path) -> str:
    """A folder, for PYTHONPATH, in which `icc` is a link to this checkout."""
    site = work / "site"
    site.mkdir(parents=True, exist_ok=True)
    if not (site / "icc").exists():
        (site / "icc").symlink_to(ROOT, target_is_directory=True)
    return str(site)


def _environment(work: Path) -> dict[str, str]:
    """The environment of the commands, in which `icc` is this checkout."""
    path = os.pathsep.join(filter(None, (_site(work), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _ended(words: Sequence[str], output: Any, seconds: float, environment: dict[str, str]) -> str:
    """Run a command in its own process group; "passed", "failed", or "late" if it was killed after `seconds`."""
    process = subprocess.Popen(
        words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment, cwd=ROOT
    )
    try:
        return "passed" if process.wait(timeout=max(seconds, 0.0)) == 0 else "failed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "late"


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.rename(path)


def limits() -> None:
    """Print the device's facts and rates."""
    import torch
    from gpu import device_limits
    from gpu_peers import seconds

    print(json.dumps(device_limits()))
    source = torch.empty(8 << 30, dtype=torch.uint8, device="cuda").view(torch.float32)
    print(f"read: {(8 << 30) / seconds(lambda: source.sum()) / 1e9:.0f} GB/s")
    subprocess.run(["nvidia-smi"], check=False)


def prepare(target: str, folder: Path) -> None:
    """Compile, without a GPU, the objects of the engines that the parts time into `folder`."""
    os.environ["ICC_CACHE_DIR"] = str(folder)
    from gpu import ENGINE_LIMITS
    from gpu_resources import lowered, searched
    from icc.compiler.targets import find_target
    from make_model import config

    for shape in ("llama-8b-quarter", "llama-1b"):
        for quant in ("rtn4", "none", "fp8"):
            start = time.monotonic()
            made = searched(*lowered(config(shape), target, quant, **ENGINE_LIMITS), find_target(target))
            seconds = time.monotonic() - start
            print(f"{shape} {quant}: {len(made.compiled)} objects in {seconds:.0f} s", flush=True)
    prepare_steps(target)


def prepare_steps(target: str) -> None:
    """Compile the objects of the part "step", in all variants, and of its engine, into the cache."""
    import gpu_step
    from gpu_resources import lowered
    from icc.compiler.backends.triton.objects.compile import compile_specs
    from icc.compiler.backends.triton.plan import plan_program
    from icc.compiler.backends.triton.tiling.choice import Tuner
    from icc.compiler.backends.triton.tiling.tuned import load_tuned
    from icc.compiler.targets import find_target
    from make_model import config

    gpu_step.few("llama-8b", 4)
    found = find_target(target)
    for quant in ("rtn4", "none"):
        start = time.monotonic()
        program, limits = lowered(config("few"), target, quant, max_batch_size=1, step_kernel=True, **gpu_step.LIMITS)
        planned = plan_program(program, limits, Tuner(found, load_tuned(found)), step_kernel=True)
        compile_specs(planned.specs().values(), found)
        gpu_step.compile_all(program, limits, target, [1])
        print(f"steps {quant}: {time.monotonic() - start:.0f} s", flush=True)


def this_target() -> str:
    """The target of this machine's GPU; ends the process if there is no GPU."""
    from icc.compiler.targets import AUTO, find_target

    found = find_target(AUTO)
    if found.backend == "cpu":
        sys.exit("this machine has no GPU: name one with --target, or use --list or --prepare")
    return found.name


def read_before(file: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The parts of an earlier visit; ends the process with one line if the file has none."""
    try:
        parts = json.loads(file.read_text())
        known = {name: part for name, part in parts.items() if "status" in part}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        parser.error(f"--before {file}: {error}")
    if not known:
        parser.error(f"--before {file}: there is no part of a visit in it")
    return known


def main() -> int:
    """Run the visit, list its parts, or prepare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--target", default="", help="default: the machine's GPU")
    parser.add_argument("--work", type=Path, default=Path("build/gpu-visit"))
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu-visit-TARGET.md")
    parser.add_argument("--before", type=Path, metavar="FILE", help="JSON of an earlier visit to compare with")
    parser.add_argument("--only", default="", help="names of parts, comma-separated")
    parser.add_argument("--again", action="store_true", help="run all parts, even those that passed")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--limits", action="store_true", help="print the device's rates and exit")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER")
    a = parser.parse_args()
    if unknown := set(filter(None, a.only.split(","))) - {part.name for part in PARTS}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; --list shows all")
    before = read_before(a.before, parser) if a.before else None
    if a.list:
        print("\n".join(f"{part.name:12} {part.seconds:4} s  {part.answers}" for part in PARTS))
        return 0
    if a.limits:
        limits()
        return 0
    work = a.work.resolve()
    sys.path.insert(0, _site(work))
    target = a.target or this_target()
    if a.prepare:
        prepare(target, a.prepare.resolve())
        return 0
    parts = [part for part in PARTS if not a.only or part.name in a.only.split(",")]
    if a.again:
        (work / "visit.json").unlink(missing_ok=True)
    out = a.out or HERE / "results" / f"gpu-visit-{target}.md"
    return Visit(parts, target, work, out, before).run(60 * a.minutes)


if __name__ == "__main__":
    sys.exit(main())
