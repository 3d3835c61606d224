"""Are kernels, packed weights and tokens unchanged? A refactoring must leave every digest as it is.

    python benchmarks/identity.py check [NAME ...]   compare with benchmarks/identity/; a line per difference, exit 1
    python benchmarks/identity.py make [NAME ...]    write the digests; review their diff like code
    python benchmarks/identity.py list [NAME ...]

NAME is a pattern such as 'pystd/h100/*' or 'tiny/gemma2*'. `--keep DIR` also writes the texts that were digested, to
compare two trees with diff. No GPU is needed: GPU kernels are rendered and planned, not compiled. The checkpoints are
the sample and the configurations of tests/tiny_models.py: a family's plain configuration in bfloat16, special ones in
float32. CPU engines also run, with the library of the best ISA level of this machine.

Digests that depend on a machine's float arithmetic (weights, tokens, logits) are kept per machine; without digests of
this machine they are not compared, and a line says so. PYTHONHASHSEED fixes the order of sets of strings, because
transformers iterates over one to make rope buffers of several layer types.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import random
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DIGESTS = Path(__file__).with_name("identity")
SAMPLE, MEDUSA = ROOT / "samples" / "pystd", ROOT / "samples" / "pystd-medusa"
CALIBRATION = {"calib_sequences": 4, "calib_length": 128}
PROMPTS = ["def fib(n):\n", "import os\n\n\nclass Reader:\n    def __init__(self", "    for name in sorted("]
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {},
    "rtn4": {"quant": "rtn4"},
    "awq4": {"quant": "awq4"},
    "gptq4": {"quant": "gptq4"},
    "medusa": {"spec": f"medusa:{MEDUSA}"},
    "medusa-rtn4": {"spec": f"medusa:{MEDUSA}", "quant": "rtn4"},
    "layer-skip-rtn4": {"spec": "layer-skip:3", "quant": "rtn4"},
    "kv-int8-rtn4": {"kv_cache": "int8", "quant": "rtn4", "quant_head": "4bit"},
    "deterministic-rtn4": {"deterministic": True, "quant": "rtn4"},
    "embed": {"task": "embed"},
    "embed-rtn4": {"task": "embed", "quant": "rtn4"},
}
GPU_ONLY = ("deterministic-rtn4",)
Digests = dict[str, Any]  # item -> digest, and machine -> such a dict


@dataclass(frozen=True)
class Case:
    """One engine: `model` is "pystd" or the name of a tiny configuration."""

    model: str
    target: str
    variant: str
    options: dict[str, Any] = field(hash=False)

    @property
    def name(self) -> str:
        return f"{'' if self.model == 'pystd' else 'tiny/'}{self.model}/{self.target}/{self.variant}"

    @property
    def file(self) -> Path:
        """The file of its digests: one per family."""
        return DIGESTS / f"{self.model.split('-')[0]}.json"

    @property
    def runs(self) -> bool:
        """Whether the engine is run: of tiny models, one of the two quantizations is enough."""
        plain = "-" not in self.model
        return self.target == "cpu" and (self.model == "pystd" or (self.variant == "rtn4") == plain)


def all_cases() -> list[Case]:
    """All cases; cases of one checkpoint are adjacent."""
    from tiny_models import tiny_configs  # type: ignore[import-not-found]

    ordered = sorted(VARIANTS.items(), key=lambda item: "embed" in item[0])  # so that each task is traced once
    sample = [(name, target, options) for name, options in ordered for target in ("cpu", "h100", "mi300x")]
    cases = [Case("pystd", t, name, options) for name, t, options in sample if t != "cpu" or name not in GPU_ONLY]
    for model in tiny_configs():
        cases += [Case(model, target, v, VARIANTS[v]) for target in ("cpu", "h100") for v in ("none", "rtn4")]
    return cases


def checkpoint(model: str, folder: Path) -> Path:
    """The directory of a checkpoint; a tiny one is written if it is missing."""
    from tiny_models import save_tiny, tiny_configs  # type: ignore[import-not-found]

    if model == "pystd":
        return SAMPLE
    path = folder / model
    if not path.exists():
        save_tiny(tiny_configs()[model], path, dtype="float32" if "-" in model else "bfloat16")
    return path


def digest(*parts: str | bytes) -> str:
    """128 bits, in hex, of the sha256 of all parts, each preceded by its length."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:32]


def digests_of(case: Case, compiler: Any, folder: Path, keep: Path | None) -> Digests:
    """Compile one case, run it if `case.runs`, and digest the results. keep: a folder for the texts, or None."""
    from identity_engine import machine, run

    model, engine = checkpoint(case.model, folder), folder / "engine"
    tiny = case.model != "pystd"
    try:
        contents = compiler.compile(model, engine, tiny, target=case.target, force=True, **CALIBRATION, **case.options)
    except icc_error() as error:
        return {"refused": f"{type(error).__name__}: {error}".replace(f"{folder}/", "")}
    if case.runs:
        source = random.Random(0)
        prompts: list[Any] = [[source.randrange(3, 119) for _ in range(length)] for length in (2, 17, 30)]
        prompts += [] if tiny else PROMPTS
        found = run(engine, prompts, [source.randrange(3, 119) for _ in range(37)], case.variant.startswith("embed"))
        contents.local |= {f"run {name}": parts for name, parts in found.items()}
    if keep is not None:
        _keep(keep / case.name, contents)
    local = {n: f"{len(parts)} of {sum(map(len, parts))} B {digest(*parts)}" for n, parts in contents.local.items()}
    groups = {name: f"{len(texts)} {digest(*sorted(texts))}" for name, texts in contents.groups.items()}
    return {**{n: digest(text) for n, text in contents.texts.items()}, **groups, **contents.facts, machine(): local}


def icc_error() -> type[Exception]:
    """The exception class of icc's refusals."""
    import icc

    return icc.IccError


def _keep(folder: Path, contents: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.texts.items():
        (folder / name.replace("/", "|")).write_text(text)
    for name, texts in contents.groups.items():
        (folder / name.replace("/", "|")).write_text("\n".join(sorted(texts)))
    for name, parts in contents.local.items():
        (folder / name.replace("/", "|")[:200]).write_text("\n".join(map(digest, parts)) + "\n")


def differences(old: Digests, new: Digests) -> list[str]:
    """A line per item that changed; items of a machine are compared only if both sides have that machine."""
    lines = []
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) or isinstance(after, dict):
            if isinstance(before, dict) and isinstance(after, dict):
                lines += differences(before, after)
        elif before != after:
            lines.append(f"{name}: {before or 'was not there'} -> {after or 'is gone'}")
    return lines


def read(file: Path) -> dict[str, Digests]:
    """The cases of a file; {} if there is no such file."""
    return json.loads(file.read_text()) if file.is_file() else {}


def write(file: Path, case: Case, found: Digests) -> None:
    """Replace one case in a file. Digests of other machines stay if no machine-independent digest changed."""
    cases = read(file)
    old = cases.get(case.name, {})
    others = {name: local for name, local in old.items() if isinstance(local, dict) and name not in found}
    cases[case.name] = {**found, **others} if not differences(old, found) else found
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(cases, indent=1, sort_keys=True) + "\n")


def forgotten(names: list[str], known: set[str]) -> list[str]:
    """The names, among those that match `names`, that have digests but are no case any more."""
    kept = [name for file in sorted(DIGESTS.glob("*.json")) for name in read(file) if name not in known]
    return [name for name in kept if any(fnmatch.fnmatchcase(name, pattern) for pattern in names)]


def check(case: Case, found: Digests) -> int:
    """Print the differences; their number."""
    old = read(case.file).get(case.name)
    lines = ["it has no digests: run `make` for it"] if old is None else differences(old, found)
    for line in lines:
        print(f"{case.name}: {line}", flush=True)
    return len(lines)


def tree() -> list[tuple[str, int]]:
    """Every source file and its mtime in ns: modules are imported late, so an edit during a run would mix two trees."""
    folders = ("compiler", "passes", "runtime", "codegen_templates")
    files = (file for folder in folders for file in (ROOT / folder).rglob("*"))
    return sorted((str(file), file.stat().st_mtime_ns) for file in files if file.suffix in (".py", ".jinja", ".h"))


def main(argv: list[str]) -> int:
    """Run the command line; exit code 1 if something differs, 2 if icc was edited during the run."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, __file__, *argv])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("make", "check", "list"))
    parser.add_argument("names", nargs="*", default=["*"], help="patterns of cases (default: all)")
    parser.add_argument("--keep", type=Path, help="also write the digested texts to this directory")
    options = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT / "tests"))
    warnings.filterwarnings("ignore")
    every = all_cases()
    cases = [case for case in every if any(fnmatch.fnmatchcase(case.name, p) for p in options.names)]
    if not cases:
        parser.error(f"no case is called {' or '.join(options.names)}; list shows them")
    if options.command == "list":
        print("\n".join(case.name for case in cases))
        return 0
    gone = forgotten(options.names, {case.name for case in every})
    for name in gone:
        print(f"{name}: has digests, but is no case any more: delete them", flush=True)
    return compare(cases, options.command == "make", options.keep) or int(bool(gone))


def compare(cases: list[Case], make: bool, keep: Path | None) -> int:
    """Make or check all cases; the exit code."""
    import torch
    import transformers
    from identity_engine import Compiler, machine

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # fixes the order of sums in calibrated rounding
    os.environ.pop("ICC_TUNING", None)
    different, unknown, start, before = 0, 0, time.monotonic(), tree()
    with tempfile.TemporaryDirectory(prefix="icc-identity-") as name:
        compiler = Compiler(Path(name))
        for case in cases:
            began = time.monotonic()
            found = digests_of(case, compiler, Path(name), keep)
            if make:
                write(case.file, case, found)
            else:
                different += check(case, found)
                unknown += machine() not in read(case.file).get(case.name, {})
            print(f"{case.name} ({time.monotonic() - began:.1f} s)", file=sys.stderr, flush=True)
    if unknown:
        print(f"weights and tokens of {unknown} engines are not compared: there are no digests made on {machine()}")
    verdict = "made" if make else f"{different} differences" if different else "all equal"
    print(f"{len(cases)} engines in {time.monotonic() - start:.0f} s: {verdict}")
    if tree() != before:
        print("icc was edited while this ran, so the digests may be of neither: run it again")
        return 2
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
