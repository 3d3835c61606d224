"""Stores the results of a calibration on disk as it proceeds, so that an interrupted one can resume.

    00003.safetensors    the result of job or group 3: arrays, and facts in the file's metadata
    values.safetensors   the values that are alive between two nodes of the stream, for the nodes that follow

Every file is renamed into place when it is complete. If a store cannot be written, the calibration continues but cannot
be resumed from that point.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

SAVE_EVERY_S = 20.0  # least seconds between two writes of values
_VALUES = "values"

Values = dict[str, list[Tensor]]
"""Values by the name of their node, one per sequence."""


@dataclass
class PassStore:
    """The files of one pass in `folder`; None: nothing is stored."""

    folder: Path | None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._saved_at = self.clock()

    def get(self, number: int, **expected: Any) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The stored arrays and facts of a number; None if there are none, or the facts are not as expected."""
        found = self._read(f"{number:05d}")
        if found is None or any(found[1].get(name) != value for name, value in expected.items()):
            return None
        return found

    def put(self, number: int, arrays: Mapping[str, Tensor], **facts: Any) -> None:
        """Store the result of a number; facts are plain values."""
        self._write(f"{number:05d}", arrays, facts)

    def values(self) -> tuple[str, Values] | None:
        """The node at which values were stored, and the values by the names of their nodes; None if none were."""
        found = self._read(_VALUES)
        if found is None:
            return None
        arrays, facts = found
        return facts["node"], {name: list(arrays[name].split(sizes)) for name, sizes in facts["values"].items()}

    def keep_values(self, node: str, live: Callable[[], Values | None]) -> None:
        """Store the result of `live`, the values that are needed from `node` on, at most once per SAVE_EVERY_S seconds.
        If `live` gives None, they cannot be stored here."""
        if self.folder is None or self.clock() - self._saved_at < SAVE_EVERY_S:
            return
        values = live()
        if values is not None:
            sizes = {name: [len(value) for value in found] for name, found in values.items()}
            self._write(_VALUES, {name: torch.cat(v) for name, v in values.items()}, {"node": node, "values": sizes})
            self._saved_at = self.clock()

    def _read(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        if self.folder is None:
            return None
        try:
            with safe_open(self.folder / f"{name}.safetensors", framework="pt") as file:
                facts = json.loads((file.metadata() or {})["facts"])
                return {key: file.get_tensor(key) for key in file.keys()}, facts
        except (OSError, SafetensorError, KeyError, ValueError):
            return None

    def _write(self, name: str, arrays: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        if self.folder is None:
            return
        whole = {key: value.cpu().contiguous() for key, value in arrays.items()}
        partial = self.folder / f"{name}.partial"
        with contextlib.suppress(OSError, SafetensorError):
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(whole, partial, {"facts": json.dumps(facts)})
            os.replace(partial, self.folder / f"{name}.safetensors")


NOWHERE = PassStore(None)
