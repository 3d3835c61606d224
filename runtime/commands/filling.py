"""How many states of recurrent layers a load touches. That depends on the steps in which its prompts run, so the
scheduler is run, without a device."""

from __future__ import annotations

from ..batch.scheduled import StepOutcome
from ..format.kv import KVMemory
from ..format.manifest import Limits
from ..kv.config import GroupConfig
from ..scheduler.config import SchedulerConfig
from ..scheduler.request import RequestSpec
from ..scheduler.scheduler import Scheduler

_ANSWER = 8  # tokens of each sequence's answer; longer answers leave no more states
_MOST = 1 << 22  # tokens; a larger load is not run: it counts as touching all states


def states_touched(cache: KVMemory, load: Limits) -> list[int]:
    """The number of blocks of each KV group that the sequences of `load` have used if all come at once, each with its
    own prompt.

    Pools hand out the blocks that were freed last, so the used blocks have the lowest numbers.
    """
    counts, groups = cache.num_blocks, cache.layout.groups
    if load.max_batch_size * load.max_seq_len > _MOST:
        return list(counts)
    configs = [GroupConfig(n, g.block_size, 0, g.policy) for n, g in zip(counts, groups, strict=True)]
    rows = min(load.max_batch_size, load.max_step_tokens)
    scheduler = Scheduler(SchedulerConfig(rows, load.max_step_tokens, rows, tuple(configs)))
    answer = min(_ANSWER, load.max_seq_len // 2)
    for number in range(load.max_batch_size):
        prompt = (number, *[0] * (load.max_seq_len - answer - 1))
        scheduler.add(RequestSpec(number, prompt, max(answer, 1)))
    free = list(counts)
    while scheduler.has_work():
        batch = scheduler.schedule()
        free = [min(a, group.pool.num_free) for a, group in zip(free, scheduler.kv.groups, strict=True)]
        scheduler.update([StepOutcome(s.request_id, 0) for s in batch.sequences if s.num_logits])
    return [count - least for count, least in zip(counts, free, strict=True)]
