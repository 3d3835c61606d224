"""Child processes ignore Ctrl-C and SIGTERM, which a terminal sends to all processes; their parent ends them."""

from __future__ import annotations

import signal
import subprocess
import sys

from icc.runtime.parent import deaf_to_signals

# as if Ctrl-C came while the interpreter or a library is being loaded
SCRIPT = "import os, signal; [os.kill(os.getpid(), n) for n in (signal.SIGINT, signal.SIGTERM)]; print('goes on')"


def test_a_process_hears_nothing_from_its_first_instruction_on() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with deaf_to_signals():
        process = subprocess.Popen([sys.executable, "-S", "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert process.communicate(timeout=60) == (b"goes on\n", b"") and process.returncode == 0
