"""lm-evaluation-harness: its own command runs the `local-completions` model on the task in lm_eval_task/."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from features import report, url

TASK = Path(__file__).with_name("lm_eval_task")


def local_completions() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = str(TASK / "counting.jsonl")
        Path(folder, "counting.yaml").write_text((TASK / "counting.yaml").read_text().replace("DATA", data))
        arguments = f"model=scripted,base_url={url()}/v1/completions,tokenizer_backend=None,tokenized_requests=False"
        command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
        command += ["--tasks", "icc_counting", "--include_path", folder, "--output_path", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-300:]
        [results] = Path(folder).rglob("results_*.json")
        scores = json.loads(results.read_text())["results"]["icc_counting"]
        assert scores["exact_match,none"] == 1.0, scores


report({"local_completions": local_completions})
