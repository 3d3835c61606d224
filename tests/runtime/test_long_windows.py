"""32,768 tokens of a model with five windowed layers per full layer: blocks that fall out of windows are freed, as
planned."""

from __future__ import annotations

import numpy as np
from icc.compiler.backends.cpu.backend import CPU_PROFILE
from icc.compiler.eviction import Eviction
from icc.compiler.program.builder import Cached
from icc.compiler.program.context import LowerOptions
from icc.compiler.program.kv_groups import group_layers
from icc.runtime.batch.scheduled import StepOutcome
from icc.runtime.format.kv import KVLayer, KVLayout
from icc.runtime.format.manifest import Limits
from icc.runtime.kv.config import GroupConfig
from icc.runtime.kv.sequence import NO_BLOCK
from icc.runtime.loop.fake import FakeExecutor
from icc.runtime.scheduler.request import RequestSpec
from icc.runtime.scheduler.scheduler import Scheduler, SchedulerConfig

LENGTH, STEP, WINDOW, SINKS = 32768, 512, 1024, 4
LIMITS = Limits(LENGTH, 2, STEP)
LAYER = KVLayer(4, 64, 64)


def layout() -> KVLayout:
    """The KV layout of twelve layers, of which every sixth keeps all tokens, and of one with sinks and a window."""
    layers = {n: Cached(LAYER, "bf16", 0 if n % 6 == 5 else WINDOW) for n in range(12)} | {
        12: Cached(LAYER, "bf16", WINDOW, Eviction("streaming", WINDOW, SINKS))
    }
    return group_layers(layers, LowerOptions("bf16", CPU_PROFILE, max_seq_len=LENGTH))


def test_memory_is_what_the_windows_need() -> None:
    groups = layout().groups
    full = groups[1]
    assert [(g.keeps, len(g.layers)) for g in groups] == [("window", 10), ("all", 2), ("streaming", 1)]
    per_layer = 2 * 4 * 64 * 2  # bytes per token
    assert full.bytes_per_token() == 2 * per_layer
    one = layout().blocks_needed(LIMITS, 1)
    most = (WINDOW + full.block_size - 2) // full.block_size + 1 + STEP // full.block_size + 1
    assert one == (most, LENGTH // full.block_size, most + 1)
    held = sum(count * group.block_bytes() for count, group in zip(one, groups, strict=True))
    assert held < 0.25 * 13 * per_layer * LENGTH


def test_blocks_behind_the_windows_are_freed_in_every_group() -> None:
    """Two prompts of almost 32k tokens, the second with the prefix of the first: all kept tokens are read correctly in
    every step, and no step holds more blocks than planned."""
    kv = layout()
    counts = kv.blocks_needed(LIMITS, 2)
    configs = [GroupConfig(n, g.block_size, 0, g.policy) for n, g in zip(counts, kv.groups, strict=True)]
    window, full, streaming = configs
    fake = FakeExecutor(
        vocab_size=64, num_blocks=full.num_blocks, block_size=full.block_size, max_step_tokens=STEP,
        rule=lambda context, size: (context[-1] * 31 + len(context)) % size, more_groups=(window, streaming),
    )  # fmt: skip
    scheduler = Scheduler(SchedulerConfig(2, STEP, 16, fake.groups))
    tokens = np.random.default_rng(0).integers(0, 64, LENGTH - 16)
    first = tuple(tokens.tolist())
    scheduler.add(RequestSpec(1, first, 8))
    starts, most = run(scheduler, fake)
    assert starts[0] == 0
    for group, held in zip(scheduler.kv.groups[1:], most[1:], strict=True):
        bound = group.policy.most_blocks(LENGTH, group.block_size) + STEP // group.block_size + 1
        assert held <= bound < LENGTH // group.block_size // 10
    assert most[0] == -(-(len(first) + 8) // full.block_size)
    scheduler.add(RequestSpec(2, (*first[: LENGTH - 600], *first[:100]), 8))  # a prefix that ends inside blocks
    starts, _ = run(scheduler, fake)
    assert starts[0] == (LENGTH - 600) // full.block_size * full.block_size
    assert scheduler.kv.is_idle


def run(scheduler: Scheduler, fake: FakeExecutor) -> tuple[list[int], list[int]]:
    """The start positions of a request's steps, and the most blocks that it held in each group."""
    starts: list[int] = []
    most = [0] * len(scheduler.kv.groups)
    while scheduler.has_work():
        batch = scheduler.schedule()
        logits = fake.step(batch)
        for number in range(len(most)):
            held = {b for s in batch.sequences for b in s.block_tables[number] if b != NO_BLOCK}
            most[number] = max(most[number], len(held))
        starts += [s.start for s in batch.sequences]
        wanted = [s for s in batch.sequences if s.num_logits]
        scheduler.update([StepOutcome(s.request_id, int(row.argmax())) for s, row in zip(wanted, logits, strict=True)])
        scheduler.check()
    return starts, most
