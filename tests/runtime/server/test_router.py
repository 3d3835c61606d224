"""The choice of a replica for a prompt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from icc.runtime.errors import UsageError
from icc.runtime.executor.cpu.cores import read_cores
from icc.runtime.format.manifest import Manifest
from icc.runtime.options import LoadOptions
from icc.runtime.requests.params import SamplingParams
from icc.runtime.server.engine.messages import Submit
from icc.runtime.server.engine.router import CHUNK, ReplicaLoad, Router, prefix_keys
from icc.runtime.server.replicas import replica_loads

PROMPT = tuple(range(10 * CHUNK))
IDLE = [ReplicaLoad(number, 0, 0, 8, 0.0, True) for number in range(3)]


def load(replica: int, waiting: int = 0, sequences: int = 0, usage: float = 0.0, adapter: bool = True) -> ReplicaLoad:
    return ReplicaLoad(replica, waiting, sequences, 8, usage, adapter)


def keys(tokens: tuple[int, ...], **fields: object) -> list[bytes]:
    return prefix_keys(Submit(0, tokens, SamplingParams(), **fields))  # type: ignore[arg-type]


def choose(router: Router, tokens: tuple[int, ...], loads: list[ReplicaLoad]) -> tuple[int, int]:
    found, cost = router.choose(keys(tokens), len(tokens), loads)
    return found.replica, cost


def test_a_conversation_stays_where_its_beginning_is() -> None:
    router = Router()
    router.ran(1, keys(PROMPT), 10_000)
    assert choose(router, (*PROMPT, 1, 2, 3), IDLE) == (1, 3)
    assert choose(router, PROMPT, IDLE) == (1, 1)  # at least one token is always computed
    assert choose(router, (*PROMPT[: 3 * CHUNK + 5], 7), IDLE) == (1, 6)
    assert choose(router, (9, *PROMPT), IDLE) == (0, len(PROMPT) + 1)
    router.forget(1)
    assert choose(router, PROMPT, IDLE) == (0, len(PROMPT))


def test_not_where_others_wait_longer_than_computing_takes() -> None:
    router = Router()
    router.ran(1, keys(PROMPT), 10_000)
    assert choose(router, PROMPT, [load(0), load(1, waiting=200)])[0] == 1
    assert choose(router, PROMPT, [load(0), load(1, waiting=2 * len(PROMPT))])[0] == 0
    assert choose(router, PROMPT, [load(0), load(1, sequences=9)])[0] == 0  # its batch is full
    assert choose(router, PROMPT, [load(0), load(1, usage=0.95)])[0] == 0  # its cache is almost full


def test_the_least_load_where_nobody_knows_it() -> None:
    router = Router()
    assert choose(router, (1, 2), [load(0, sequences=2), load(1, sequences=1)])[0] == 1
    assert choose(router, (1, 2), [load(0, waiting=90), load(1, sequences=1)])[0] == 1
    assert choose(router, (1, 2), [load(0, adapter=False), load(1, sequences=3)])[0] == 1


def test_what_may_not_share_blocks_has_other_keys() -> None:
    assert len({keys(PROMPT)[0], keys(PROMPT, salt=b"a")[0], keys(PROMPT, adapter="a")[0]}) == 3
    assert keys(PROMPT)[:3] == keys(PROMPT[: 3 * CHUNK]) and keys(PROMPT[: CHUNK - 1]) == []


def test_a_replica_remembers_as_much_as_its_cache_holds() -> None:
    router = Router()
    router.ran(0, keys(PROMPT), 4 * CHUNK)
    assert choose(router, PROMPT, [load(0)])[1] == 6 * CHUNK  # the end of the prompt was dropped first
    router.ran(0, keys(tuple(range(5000, 5000 + 4 * CHUNK))), 4 * CHUNK)
    assert choose(router, PROMPT, [load(0)])[1] == len(PROMPT)


def test_each_replica_has_as_many_threads_as_cores(
    toy_manifest: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("icc.runtime.server.replicas.usable_cores", lambda cores: 8 if cores is None else len(cores))

    def threads(cores: str | None, threads: int | None = None) -> list[int | None]:
        load = LoadOptions("e", cores=cores, threads=threads)
        return [one.threads for one in replica_loads(load, toy_manifest(), 2, None)]

    assert threads("0-2,3") == [3, 1] and threads("0-3") == [2, 2] and threads(None) == [4, 4]
    assert threads("0-2,3", 2) == [2, 2]


def test_cores_and_memory_are_divided(toy_manifest: Callable[..., Manifest]) -> None:
    manifest = toy_manifest()

    def cores(text: str | None, count: int) -> list[str | None]:
        return [one.cores for one in replica_loads(LoadOptions("e", cores=text), manifest, count, None)]

    assert cores("0-3,4-7", 2) == ["0-3", "4-7"]
    assert [read_cores(part or "") for part in cores("0-7", 2)] == [set(range(4)), set(range(4, 8))]
    assert cores(None, 3) == [None] * 3
    [first, second] = replica_loads(LoadOptions("e", kv_bytes=100), manifest, 2, None)
    assert first == second and first.kv_bytes == 100 and first.threads
    shares = [replica_loads(LoadOptions("e"), manifest, count, None)[0].kv_bytes or 0 for count in (2, 4)]
    assert 1.5 < shares[0] / shares[1] < 3  # shares of the free memory, which changes meanwhile
    assert replica_loads(LoadOptions("e"), manifest, 1, None) == [LoadOptions("e")]
    with pytest.raises(UsageError, match="--cores 0-1 has 2 cores for 3 replicas"):
        cores("0-1", 3)
    for count in (0, 65):
        with pytest.raises(UsageError, match="--replicas"):
            cores(None, count)
    with pytest.raises(UsageError, match="--devices is for GPU engines"):
        replica_loads(LoadOptions("e"), manifest, 2, "0,1")
