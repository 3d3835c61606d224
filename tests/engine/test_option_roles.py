"""A compile option declares once where it counts; the command line, cache keys, calibrations and `icc plan` read
this."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import click
import pytest
from icc.compiler.cli import COMMANDS
from icc.compiler.errors import UsageError
from icc.compiler.identity import stated
from icc.compiler.options import CompileOptions
from icc.runtime.cli.fields import field_options
from icc.runtime.settings import named_by_role, setting, settings

CALIBRATES_NOT = {"adapters", 
    "target", "kv_cache", "kv_bits", "state_cache", "kv_policy", "max_batch_size", "max_step_tokens", "spec",
    "spec_guesses", "deterministic", "tune", "tensor_parallel", "pipeline_parallel", "expert_parallel", "isa", "os",
    "sequence_parallel", "step_kernel",
}  # fmt: skip


@dataclass(frozen=True)
class More(CompileOptions):
    """Options with three more that no other file knows."""

    wider: int = setting(1, "Counts for everything.", least=1, plan=True, on_demand=True)
    later: str = setting("no", "Of the engine alone.", calibration=False)
    loud: bool = setting(False, "Of neither.", engine=False)


def test_an_option_reaches_all_that_its_roles_name() -> None:
    @click.command
    @field_options(More)
    def command() -> None: ...

    assert {"--wider", "--later", "--loud"} <= {word for param in command.params for word in param.opts}
    options = More(Path("m"), Path("e"))
    engine, calibration = stated(options), stated(options, "calibration")
    assert {"wider", "later"} <= engine.keys() and "loud" not in engine
    assert "wider" in calibration and not {"later", "loud"} & calibration.keys()
    assert "wider" in named_by_role(More, "plan") and "wider" in named_by_role(More, "on_demand")
    with pytest.raises(UsageError, match="--wider must be at least 1, not 0"):
        replace(options, wider=0)


def test_what_the_keys_depend_on() -> None:
    options = CompileOptions(Path("m"), Path("e"))
    every = set(settings(CompileOptions))
    assert stated(options).keys() == every - {"force", "dump_passes", "like", "prefix", "schema", "grammar"}
    assert stated(options, "calibration").keys() == stated(options).keys() - CALIBRATES_NOT


def test_commands_offer_what_has_their_role() -> None:
    own = {param.name for param in COMMANDS["plan"].load().params}
    assert set(named_by_role(CompileOptions, "plan")) <= own and "force" not in own
    for name in ("run", "chat", "serve"):
        offered = {param.name for param in COMMANDS[name].load().params}
        assert set(named_by_role(CompileOptions, "on_demand")) <= offered and "calib" not in offered
