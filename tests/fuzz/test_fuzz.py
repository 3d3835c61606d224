"""RELIABILITY S2: every parser accepts an input, or refuses it in one line; see fuzz.py."""

from __future__ import annotations

import faulthandler
import os
import random
import re
import signal
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
from sizes import size_of

sys.path.insert(0, str(Path(__file__).parent))
import fuzz
from changing import BYTES, JSON, near, safetensors_header
from fuzz import CORPUS, Finding, Target, check, examples, smaller
from icc.runtime.errors import RequestError, UsageError
from targets import TARGETS

EXAMPLES = size_of("fuzz_examples")


def test_every_target_has_seeds_and_every_seed_a_target() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == TARGETS.keys()
    for target in TARGETS.values():
        assert all(len(seed) <= 64 << 10 for seed in target.seeds()), f"{target.name}: seeds are small"


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_in_the_corpus(name: str) -> None:
    """At least one seed is accepted; otherwise nothing after the first check would be tested."""
    assert any([check(TARGETS[name], seed) for seed in TARGETS[name].seeds()])


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_are_taken_or_refused_in_one_line(name: str) -> None:
    target = TARGETS[name]
    accepted = 0
    for data in islice(examples(target, 0), int(EXAMPLES * target.weight)):
        try:
            accepted += check(target, data)
        except Finding as finding:
            pytest.fail(f"{finding}: python tests/fuzz/fuzz.py {name} --seed 0 keeps it; {data[:300]!r}")
    assert accepted < EXAMPLES * target.weight, "the changes change something"


# -- the harness -----------------------------------------------------------------------------------------------------


def target_of(parse: object) -> Target:
    return Target("signature", parse, BYTES)  # type: ignore[arg-type]


def refuse(error: BaseException) -> object:
    raise error


@pytest.mark.parametrize(
    ("parse", "says"),
    [
        (lambda data: data[1000], "IndexError"),
        (lambda data: refuse(UsageError("")), "other than one line"),
        (lambda data: refuse(UsageError("two\nlines")), "other than one line"),
        (lambda data: refuse(UsageError("a" * 3000)), "3000 characters"),
        (lambda data: refuse(SystemExit(1)), "SystemExit"),
    ],
)
def test_what_is_a_finding(parse: object, says: str) -> None:
    with pytest.raises(Finding, match=says):
        check(target_of(parse), b"x")


def test_too_much_time_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 60.0])
    monkeypatch.setattr(fuzz.time, "process_time", lambda: next(clock))
    with pytest.raises(Finding, match=r"took 60\.0 s"):
        check(target_of(lambda data: data), b"x")


def test_what_is_none() -> None:
    assert check(target_of(lambda data: data), b"x")
    assert not check(target_of(lambda data: refuse(RequestError("no"))), b"x")


def test_a_finding_is_made_smaller_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A separate process tries the inputs, as in `make fuzz`, and may be killed by one."""
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "plain").write_bytes(b"a" * 200)
    monkeypatch.setattr(fuzz, "CORPUS", tmp_path)

    def parse(data: bytes) -> None:
        assert b"\xff" not in data

    assert not fuzz.fuzz(Target("planted", parse, BYTES), 1, 30, tmp_path / "under")
    [found] = (tmp_path / "planted").glob("found-*")
    assert b"\xff" in found.read_bytes() and len(found.read_bytes()) < 50
    assert str(found) in capfd.readouterr().out
    found.unlink()

    def die(data: bytes) -> None:
        faulthandler.disable()  # its output looks like the end of the test run itself
        if data != b"a" * 200:
            os.kill(os.getpid(), signal.SIGSEGV)

    assert not fuzz.fuzz(Target("planted", die, BYTES), 1, 30, tmp_path / "under")
    assert list((tmp_path / "planted").glob("found-*")) and "signal 11" in capfd.readouterr().out
    assert fuzz.fuzz(Target("planted", len, BYTES), 1, 0.3, tmp_path / "under")

    def grow(data: bytes) -> None:
        bytearray(b"a") * (400 << 20)

    assert not fuzz.fuzz(Target("planted", grow, BYTES), 1, 30, tmp_path / "under")
    assert re.search(r"took \d+ MiB", capfd.readouterr().out)


def test_the_same_seed_gives_the_same_inputs() -> None:
    one, again, other = (list(islice(examples(TARGETS["manifest"], seed), 20)) for seed in (1, 1, 2))
    assert one == again != other


def test_a_smaller_input_is_trouble_still() -> None:
    target = target_of(lambda data: refuse(ValueError()) if data.count(b"b") >= 2 else None)
    assert smaller(target, b"aaabaaaaaaabaaaa") == b"bb"


def test_changes_keep_the_form_that_they_know() -> None:
    chance = random.Random(0)
    file = (CORPUS / "weights" / "plain").read_bytes()
    for _ in range(50):
        changed = safetensors_header(file, chance, [file])
        size = int.from_bytes(changed[:8], "little")
        assert 0 < size <= len(changed) - 8
    archive = (CORPUS / "one_file" / "toy.icc").read_bytes()
    places = [i for i in range(len(archive)) if archive.startswith(b"PK\5\6", i)]
    for _ in range(20):
        changed = near(b"PK\5\6", reach=22)(archive, chance, [archive])
        assert len(changed) == len(archive) and changed[: places[0]] == archive[: places[0]]
    for change in (*BYTES, *JSON):
        for data in (b"", b"0", b"{}", b"[1"):
            assert isinstance(change(data, chance, [data]), bytes)


def test_changes_take_no_time() -> None:
    began = time.process_time()
    for _ in islice(examples(TARGETS["requests"], 0), 300):
        pass
    assert time.process_time() - began < 5
