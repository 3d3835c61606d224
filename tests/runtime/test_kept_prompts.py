"""Beginnings of prompts that requests ask to keep: in the cache for some time, and on disk across restarts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from icc.runtime.errors import CapacityError
from icc.runtime.kv.config import GroupConfig
from icc.runtime.kv.policy import Window
from icc.runtime.kv.sequence import CachedSequence
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeDevice, FakeExecutor
from icc.runtime.prefixes.blocks import KVBlocks, in_reach
from icc.runtime.prefixes.kept import KeptPrompts
from icc.runtime.prefixes.pinned import PinnedPrefix, PinnedPrefixes
from icc.runtime.prefixes.store import PromptStore
from icc.runtime.requests.params import SamplingParams
from icc.runtime.requests.request import Standing
from icc.runtime.scheduler.request import RequestSpec

PROMPT = tuple(range(1, 40))
ONCE = SamplingParams(max_tokens=1, temperature=0)


class Side:
    """The part of an engine process: an engine on a fake device, whose cache holds the token ids themselves."""

    def __init__(
        self, manifest: Any, folder: Path | None = None, most: int = 1 << 20, engine: bytes = b"e", **more: Any
    ) -> None:
        self.now = 0.0
        self.llm = LLM(manifest, FakeExecutor(vocab_size=64, num_blocks=24, block_size=4, **more))
        self.blocks = KVBlocks(engine, self.llm.executor)  # type: ignore[arg-type]
        self.store = None if folder is None else PromptStore(folder, self.blocks.identity, most)
        self.kept = KeptPrompts(lambda: self.kv, 64, self.blocks, self.store, lambda: self.now)

    @property
    def kv(self) -> Any:
        return self.llm.loop.scheduler.kv

    def sequence(self, prompt: tuple[int, ...] = PROMPT, salt: bytes = b"") -> CachedSequence:
        return CachedSequence(tokens=list(prompt), salt=salt)

    def ask(self, prompt: tuple[int, ...] = PROMPT, keep: int = 0, seconds: float = 300.0, salt: bytes = b"") -> int:
        """Run a prompt. Returns how many of its tokens were cached."""
        sequence, there = self.sequence(prompt, salt), list[bool]()
        if self.kept.fetch(sequence, lambda: there.append(True)):
            self.until(lambda: bool(there))
        self.kept.use(sequence)
        if keep:
            self.kept.keep(sequence, keep, seconds)
        [one] = self.llm.loop.add(prompt, ONCE, Standing(salt=salt, first_turn=keep))
        while self.llm.loop.has_work():
            self.llm.loop.step()
            self.kept.turn()
        self.kv.check([], [])
        return one.num_cached_tokens or 0

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not true():
            assert time.monotonic() < end
            self.kept.turn()
            time.sleep(0.001)

    def stored(self, folder: Path) -> list[Path]:
        """The stored files, once all are written."""
        self.until(lambda: not list(folder.glob("*.partial")) and bool(list(folder.glob("*.kv"))))
        self.kept.turn()
        return sorted(folder.glob("*.kv"))

    def crowd(self) -> None:
        """Run other prompts, which evict all blocks that are not kept."""
        for n in range(12):
            self.ask(tuple((n * 5 + k) % 60 + 1 for k in range(50)))


@pytest.fixture
def side(toy_manifest: Callable[..., Any]) -> Callable[..., Side]:
    return lambda *args, **more: Side(toy_manifest(vocab_size=64, max_seq_len=64), *args, **more)


def test_what_is_kept_is_not_pushed_out_until_its_time_is_over(side: Callable[..., Side]) -> None:
    one = side()
    one.ask(keep=22)
    assert one.kept.num_kept == 1
    one.crowd()
    one.now = 200.0
    assert one.ask() == 20  # whole blocks of 4 in 22 tokens
    one.now = 499.0  # last used at 200
    one.crowd()
    assert one.ask() == 20
    one.now = 800.0
    one.kept.turn()
    assert one.kept.num_kept == 0 and one.kv.is_idle
    one.crowd()
    assert one.ask() == 0


def test_without_it_others_push_it_out(side: Callable[..., Side]) -> None:
    one = side()
    one.ask()
    one.crowd()
    assert one.ask() == 0


def test_a_whole_prompt_is_kept_and_found_by_itself(side: Callable[..., Side], tmp_path: Path) -> None:
    one = side(tmp_path)
    one.ask(PROMPT[:20], keep=20)
    one.stored(tmp_path)
    assert one.ask(PROMPT[:20]) == 16 == side(tmp_path).ask(PROMPT[:20])


def test_a_longer_time_wins(side: Callable[..., Side]) -> None:
    one = side()
    one.ask(keep=20, seconds=3600)
    one.ask(keep=20, seconds=300)
    one.now = 3000.0
    one.kept.turn()
    assert one.kept.num_kept == 1


def test_half_the_cache_may_be_kept_and_the_oldest_goes(side: Callable[..., Side]) -> None:
    one = side()
    for n in range(4):
        one.now = float(n)
        one.ask(tuple(range(n + 1, n + 1 + 21)), keep=20)  # 5 of 24 blocks each
    assert one.kept.num_kept == 1, "a request of 64 tokens needs 16 of the 24 blocks"
    one.crowd()
    assert one.ask(tuple(range(4, 4 + 21))) == 20


def test_it_is_pinned_again_in_a_new_cache(side: Callable[..., Side]) -> None:
    one = side()
    one.ask(keep=20)
    one.llm.loop.reset()
    one.kept.turn()
    assert one.kept.num_kept == 0
    one.ask()
    assert one.kept.num_kept == 1
    one.crowd()
    assert one.ask() == 20


WINDOW = (GroupConfig(24, 4, policy=Window(8)),)


@pytest.mark.parametrize("more", [(), WINDOW], ids=["all", "window"])
def test_another_process_finds_it_on_disk(side: Callable[..., Side], tmp_path: Path, more: Any) -> None:
    first = side(tmp_path, more_groups=more)
    first.ask(keep=20, salt=b"tenant")
    [file] = first.stored(tmp_path)
    assert file.stat().st_mode & 0o077 == 0
    assert first.kv.is_idle and first.kept.num_kept == 1
    second = side(tmp_path, more_groups=more)
    assert second.ask(salt=b"another") == 0, "a tenant finds what another one has asked to keep"
    assert second.ask(salt=b"tenant") == 20
    assert second.kept.num_kept == 1  # for the full time again
    [found] = second.kv.found(second.sequence(salt=b"tenant"), 20)[:1]
    if not more:
        held = [bytes(view) for n in sorted(found) for view in second.blocks.views(0, found[n])]
        assert b"".join(held) == b"".join(int(token).to_bytes(8, "little") for token in PROMPT[:20])


def test_another_engine_does_not(side: Callable[..., Side], tmp_path: Path) -> None:
    first = side(tmp_path)
    first.ask(keep=20)
    first.stored(tmp_path)
    assert side(tmp_path, engine=b"f").ask() == 0
    assert len(list(tmp_path.glob("*.kv"))) == 1  # the file stays for its own engine


@pytest.mark.parametrize("damage", ["bit", "cut", "header", "empty"])
def test_a_damaged_file_is_told_of_and_removed(
    side: Callable[..., Side], tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = side(tmp_path)
    first.ask(keep=20)
    [file] = first.stored(tmp_path)
    content = file.read_bytes()
    changed = {
        "bit": content[:-1] + bytes([content[-1] ^ 1]),
        "cut": content[:-3],
        "header": b"x" * 40 + content[40:],
        "empty": b"",
    }
    file.write_bytes(changed[damage])
    second = side(tmp_path)
    assert second.ask() == 0
    assert not list(tmp_path.glob("*.kv"))
    assert "damaged, and removed" in caplog.text
    assert second.ask() > 0  # the prompt is computed as usual


def test_a_folder_that_cannot_be_written_harms_nobody(
    side: Callable[..., Side], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts are still read from it; requests do not notice damaged files, or that nothing can be stored."""
    import os

    first = side(tmp_path)
    first.ask(keep=20)
    [file] = first.stored(tmp_path)

    def refused(*args: Any, **more: Any) -> None:
        raise OSError(30, "Read-only file system")

    for name in ("unlink", "replace", "utime"):
        monkeypatch.setattr(os, name, refused)
    monkeypatch.setattr(Path, "unlink", refused)
    assert side(tmp_path).ask() > 0
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    second = side(tmp_path)
    assert second.ask() == 0 and "cannot be removed: Read-only file system" in caplog.text
    second.ask(tuple(range(20, 50)), keep=20)
    second.until(lambda: "a prompt is not stored: Read-only file system" in caplog.text)


def test_what_is_no_plain_file_stays(side: Callable[..., Side], tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.kv")
    (tmp_path / "folder.kv").mkdir()
    (tmp_path / "link.kv").symlink_to("/etc/hostname")
    one = side(tmp_path)
    one.ask(keep=20)
    one.until(lambda: len(list(tmp_path.glob("*.kv"))) == 4)
    assert side(tmp_path).ask() > 0


def test_what_is_longest_unused_makes_room(side: Callable[..., Side], tmp_path: Path) -> None:
    import os

    first = side(tmp_path)
    first.ask(keep=20)
    [old] = first.stored(tmp_path)
    size = old.stat().st_size
    os.utime(old, (1, time.time() - 60))
    second = side(tmp_path, most=size + 10)
    second.ask(tuple(range(20, 50)), keep=20)
    second.until(lambda: not old.exists())
    assert len(list(tmp_path.glob("*.kv"))) == 1


def test_what_is_over_goes_from_disk(side: Callable[..., Side], tmp_path: Path) -> None:
    import os

    first = side(tmp_path)
    first.ask(keep=20)
    [file] = first.stored(tmp_path)
    os.utime(file, (1, time.time() - 301))
    assert side(tmp_path).ask() == 0 and not file.exists()


def test_a_full_disk_delays_nobody(
    side: Callable[..., Side], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from icc.runtime.prefixes import store

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_write", full)
    one = side(tmp_path)
    one.ask(keep=20)
    one.until(lambda: "is not stored" in caplog.text)
    one.kept.turn()
    assert one.kept.num_kept == 1 and not list(tmp_path.glob("*"))


def reset(one: Side) -> None:
    one.llm.loop.reset()


def discard(one: Side) -> None:
    [found] = one.kv.found(one.sequence(), 20)
    for block in found.values():
        one.kv.groups[0].pool.discard(block)


@pytest.mark.parametrize("spoil", [reset, discard])
def test_what_was_read_while_it_was_spoilt_is_not_kept(
    side: Callable[..., Side], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Side], None]
) -> None:
    """Blocks may be overwritten while they are copied: the cache then finds other blocks for the prompt, or none."""
    from icc.runtime.prefixes import store

    write, go = store._write, threading.Event()

    def slow(*args: Any) -> Any:
        go.wait(10)
        return write(*args)

    monkeypatch.setattr(store, "_write", slow)
    one = side(tmp_path)
    one.ask(keep=20)
    spoil(one)
    go.set()
    one.until(lambda: one.store is not None and one.store.finished())
    assert not list(tmp_path.glob("*"))
    one.kv.check([], [])
    assert one.kv.is_idle


def test_what_is_never_computed_is_given_up(side: Callable[..., Side]) -> None:
    one = side()
    one.kept.keep(one.sequence(), 20, 3600.0)
    one.now = 121.0
    one.kept.turn()
    assert not one.kept._kept


def test_a_cache_out_of_reach_computes_compiled_prompts_when_loaded(toy_manifest: Callable[..., Any]) -> None:
    """As for a GPU: nothing is copied into the cache, and the computed prompts are pinned, for every client."""
    from icc.compiler.measure import compute_prompts
    from icc.compiler.targets import find_target

    assert compute_prompts(Path("nowhere"), find_target("h100"), []) is None
    llm = LLM(toy_manifest(vocab_size=64, max_seq_len=64), FakeDevice(vocab_size=64, num_blocks=24, block_size=4))
    assert in_reach(llm.executor) is None
    llm.loop.keep(PinnedPrefixes([PinnedPrefix("system.txt", PROMPT[:22], 20)], None, 64))
    for n in range(12):
        llm.generate([[(n * 5 + k) % 60 + 1 for k in range(50)]], ONCE)
    [one] = llm.loop.add(PROMPT, ONCE, Standing(salt=b"tenant"))
    while llm.loop.has_work():
        llm.loop.step()
    assert one.num_cached_tokens == 20
    llm.loop.scheduler.check()


def test_a_prompt_without_room_is_told_of_and_left_out(
    toy_manifest: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(toy_manifest(vocab_size=64, max_seq_len=64), FakeDevice(vocab_size=64, num_blocks=17, block_size=4))
    llm.loop.keep(PinnedPrefixes([PinnedPrefix("system.txt", PROMPT, 36)], None, 64))
    assert "no room for compiled prompt system.txt" in caplog.text and llm.loop.scheduler.kv.is_idle
    llm.generate([list(PROMPT)], ONCE)


def test_a_request_that_pins_leave_no_room_for_is_refused(side: Callable[..., Side]) -> None:
    """It does not wait for blocks that will never be released."""
    one = side()
    one.ask(keep=32)
    assert one.kept.num_kept == 1
    with pytest.raises(CapacityError, match="the cache has 16"):
        one.llm.loop.scheduler.add(RequestSpec(99, tuple(range(60)), 20))
