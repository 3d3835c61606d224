"""Makes Ctrl-C stop an answer and nothing else."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Interrupt:
    """Within its `with` block the first Ctrl-C only sets `asked`, so that the current step completes and the engine
    keeps its cache. A second one raises KeyboardInterrupt, in case a step never ends."""

    def __init__(self) -> None:
        self._asked = False
        self._before: object = None

    def asked(self) -> bool:
        """Whether Ctrl-C was pressed within the block."""
        return self._asked

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
