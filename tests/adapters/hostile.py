"""Damaged and malicious adapters: each function here changes a good adapter in a directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj"
HUGE = "1" + "0" * 400
Damage = Callable[[Path], object]


def configured(**fields: Any) -> Damage:
    """Change these fields of its configuration."""
    return lambda folder: text(folder, {**json.loads((folder / CONFIG).read_text()), **fields})


def text(folder: Path, config: Any) -> None:
    """Write a configuration, given as text or as a JSON value."""
    (folder / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config))


def said(config: Any) -> Damage:
    """Replace its configuration by this one."""
    return lambda folder: text(folder, config)


def with_number(name: str, digits: str) -> Damage:
    """Write a number that Python would write differently, or not at all, into its configuration."""

    def damage(folder: Path) -> None:
        fields = {**json.loads((folder / CONFIG).read_text()), name: "HERE"}
        text(folder, json.dumps(fields).replace('"HERE"', digits))

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Change its tensors."""

    def damage(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS)

    return damage


def raw(data: bytes) -> Damage:
    """Replace its file of tensors by these bytes."""
    return lambda folder: (folder / WEIGHTS).write_bytes(data)


def empty_tensors(count: int) -> Damage:
    """Replace its tensors by `count` tensors without values."""

    def damage(folder: Path) -> None:
        entry = json.dumps({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
        header = ("{" + ",".join(f'"t{number}":{entry}' for number in range(count)) + "}").encode()
        raw(len(header).to_bytes(8, "little") + header)(folder)

    return damage


def placed(*entries: tuple[str, int, int], nbytes: int = 64) -> Damage:
    """Replace its tensors by float32 tensors of these names, first bytes and end bytes, over `nbytes` bytes of data."""
    parts = [
        json.dumps(name) + ":" + json.dumps({"dtype": "F32", "shape": [(end - at) // 4], "data_offsets": [at, end]})
        for name, at, end in entries
    ]
    header = ("{" + ",".join(parts) + "}").encode()
    return raw(len(header).to_bytes(8, "little") + header + bytes(nbytes))


def with_long_header(folder: Path) -> None:
    """Give its file of tensors a header of 100 MB, all of which is in the file."""
    raw((100 << 20).to_bytes(8, "little"))(folder)
    os.truncate(folder / WEIGHTS, (100 << 20) + 8)


def in_parts(folder: Path) -> None:
    """Split its tensors into parts, as transformers does with large files."""
    (folder / WEIGHTS).rename(folder / "adapter_model-00001-of-00002.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text("{}")


def pickled(folder: Path) -> None:
    """Replace its tensors by a pickle."""
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/pickled'\ntR.")


def linked(name: str, target: str) -> Damage:
    """Replace a file by a symbolic link."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return damage


def piped(name: str) -> Damage:
    """Replace a file by a pipe that nobody writes to."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def cut(folder: Path) -> None:
    """Cut off the last bytes of its tensors."""
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 100)


def emptied(folder: Path) -> None:
    """Replace its file of tensors by a directory."""
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def _key(name: str, value: torch.Tensor) -> Damage:
    return tensors(lambda found: found.update({name: value}))


ADAPTERS: dict[str, tuple[Damage, str]] = {
    "a list": (said([1, 2]), "adapter_config.json is damaged"),
    "half a configuration": (said('{"r": 4, '), "adapter_config.json is damaged"),
    "nested without end": (said("[" * 100_000), "adapter_config.json is damaged"),
    "a configuration of 5 MB": (configured(a="b" * 5_000_000), "has 500[0-9]* bytes, more than the 4194304$"),
    "rank 0": (configured(r=0), "a rank is less than 1"),
    "a negative rank": (configured(r=-4), "a rank is less than 1"),
    "a rank of 400 digits": (with_number("r", HUGE), "a rank is less than 1, or more than"),
    "a rank of many ranks": (configured(rank_pattern={"q_proj": 1 << 40}), "a rank is less than 1, or more than"),
    "alpha is no number": (with_number("lora_alpha", "NaN"), "is damaged: JSON is malformed"),
    "alpha without end": (with_number("lora_alpha", "1e999"), "is damaged: Number out of range"),
    "alpha of 400 digits": (with_number("lora_alpha", HUGE), "lora_alpha"),
    "alpha of a pattern that is too large": (configured(alpha_pattern={"q_proj": 1e300}), "not finite"),
    "a pattern that takes years": (configured(rank_pattern={"(([a-z._]+)+)+!": 4}), "could take too long"),
    "a pattern of choices": (configured(rank_pattern={"(a|a)" * 30: 4}), "could take too long"),
    "a pattern of maybes": (configured(alpha_pattern={"[a-z.]?" * 40 + "!": 4}), "could take too long"),
    "a million patterns": (
        configured(rank_pattern=dict.fromkeys(map(str, range(100_000)), 4)), "it has more than 10000 patterns"
    ),
    "a configuration that is a device": (linked(CONFIG, "/dev/zero"), "adapter_config.json is no file"),
    "a configuration that is a pipe": (piped(CONFIG), "adapter_config.json is no file"),
    "a link to itself": (linked(CONFIG, CONFIG), "cannot read .*adapter_config.json: Too many"),
    "a million tensors": (
        empty_tensors(1_000_000), "its header is longer than the file, or than 32 MiB",
    ),
    "many tensors": (
        empty_tensors(100_001), "it has 100001 tensors, more than 100000",
    ),
    "a header of exabytes": (raw((1 << 60).to_bytes(8, "little") + b"{}"), "its header is longer than the file"),
    "a header of 100 MB": (with_long_header, "its header is longer than the file, or than 32 MiB"),
    "bytes of two tensors": (
        placed(("a", 0, 64), ("b", 32, 64)), "tensor 'b' does not begin where the one before it ends",
    ),
    "a name twice": (
        placed((f"{Q}.x", 0, 32), (f"{Q}.x", 32, 64)), "q_proj.x' does not begin where the one before it ends",
    ),
    "bytes of no tensor": (placed(("a", 0, 32)), "its last 32 bytes belong to no tensor"),
    "floats of 8 bits": (
        _key(f"{Q}.lora_A.weight", torch.zeros(4, 64).to(torch.float8_e4m3fn)), "is of type F8_E4M3, not",
    ),
    "floats of 64 bits that 32 do not hold": (
        _key(f"{Q}.lora_A.weight", torch.full((4, 64), 1e300, dtype=torch.float64)), "not finite",
    ),
    "in several files": (in_parts, "is in several files"),
    "a pickle": (pickled, "has a pickle, which can run programs"),
    "integers": (_key(f"{Q}.lora_A.weight", torch.zeros(4, 64, dtype=torch.int8)), "is of type I8, not"),
    "not a number": (_key(f"{Q}.lora_A.weight", torch.full((4, 64), float("nan"))), "not finite"),
    "infinite": (_key(f"{Q}.lora_B.weight", torch.full((64, 4), float("inf"))), "not finite"),
    "a path": (_key("base_model.model.../../etc/passwd.weight", torch.zeros(4)), r"'.*\.\./etc/.*' is not used"),
    "a name without end": (
        _key(f"{Q}{'.layers.1.experts.1' * 2000}.weight", torch.zeros(4)), "a name of 38055 characters",
    ),
    "a part that is not known": (_key(f"{Q}.lora_C.weight", torch.zeros(4)), "lora_C.weight' is not used"),
    "a layer that is not there": (
        tensors(lambda t: t.update({name.replace("layers.0", "layers.77"): t.pop(name) for name in list(t)})),
        r"layers.77.self_attn.q_proj.weight",
    ),
    "another width": (_key(f"{Q}.lora_A.weight", torch.zeros(4, 48)), r"q_proj.weight: .*\[64, 48\]|\[4, 48\]"),
    "cut off": (cut, "is not .* bytes of it"),
    "a device": (linked(WEIGHTS, "/dev/zero"), "adapter_model.safetensors is no file"),
    "another file of the machine": (linked(WEIGHTS, "/etc/passwd"), "its header is longer than the file"),
    "a pipe": (piped(WEIGHTS), "adapter_model.safetensors is no file"),
    "a directory": (emptied, "model.safetensors: Is a directory"),
    "a terabyte of nothing": (
        lambda folder: os.truncate(folder / WEIGHTS, 1 << 40), "bytes, more than the [0-9]* that there is memory for",
    ),
}  # fmt: skip
