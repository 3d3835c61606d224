"""The KV of a prompt goes from one engine process to another of this host, bit for bit."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import pytest
import tokenizers
from icc.runtime.errors import UsageError
from icc.runtime.kv.sequence import CachedSequence
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeExecutor
from icc.runtime.requests.params import SamplingParams
from icc.runtime.server.engine.kv_transfer import KVTransfer, digest_of
from icc.runtime.server.engine.messages import KVGiven, Submit
from icc.runtime.server.http.kv_fetch import KVFetcher
from icc.runtime.server.http.prefillers import HEADER, Prefillers
from sizes import SOAK

from .conftest import running, serve_command

PROMPT = tuple(5 + (7 * n) % 110 for n in range(75))
# windows, recurrent states, latent caches, and other number formats
OTHERS = [
    "gemma3",
    "lfm2-short_convolutions",
    "qwen3_next-delta_rule",
    "deepseek_v3-latent_grouped_routing",
    "llama+f32",
    "llama+f16",
    "llama+bf16",
    "llama+int8",
    "llama+int4",
]
KINDS = ["llama", *(OTHERS if SOAK else [])]


@pytest.fixture(scope="module")
def engines(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Compiles a tiny model of a kind, once; its tokens are words."""
    folder, made = tmp_path_factory.mktemp("transfer"), dict[str, Path]()

    def make(kind: str) -> Path:
        if kind not in made:
            name, _, numbers = kind.partition("+")
            tiny.save_tiny(tiny.tiny_configs()[name], folder / kind)
            words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(120)}, unk_token="w0"))
            words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
            words.save(str(folder / kind / "tokenizer.json"))
            limits = {"max_step_tokens": 24, "max_batch_size": 6, "max_seq_len": 128}  # as test_same_bits: built once
            given: Any = {"target": "native", "quant": "rtn4", "kv_cache": numbers or "auto", **limits}
            made[kind] = icc.compile(folder / kind, folder / f"{kind}.engine", **given)
        return made[kind]

    return make


def transfer(llm: LLM, folder: Path) -> KVTransfer:
    return KVTransfer(digest_of(llm.manifest), llm.executor, folder)  # type: ignore[arg-type]


def bytes_of(llm: LLM, length: int) -> list[list[bytes]]:
    """The bytes of the cached blocks of PROMPT's first `length` tokens, per KV group."""
    kv = llm.loop.scheduler.kv
    blocks = kv.found(CachedSequence(tokens=list(PROMPT)), length)
    assert blocks is not None
    views: Any = llm.executor
    return [
        [b"".join(map(bytes, views.kv_views(group, held[number]))) for number in sorted(held)]
        for group, held in enumerate(blocks)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_what_arrives_is_what_would_have_been_computed(
    kind: str, engines: Callable[[str], Path], tmp_path: Path
) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=3)
    first = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    with icc.load(engines(kind), threads=1) as giver, icc.load(engines(kind), threads=1) as taker:
        giver.generate([list(PROMPT)], first)
        given = transfer(giver, tmp_path).give(giver.loop.scheduler.kv, Submit(1, PROMPT, first))
        assert given is not None and given.length >= 32
        submit = Submit(2, PROMPT, params, takes_kv=given.name)
        kv = taker.loop.scheduler.kv
        assert transfer(taker, tmp_path).take(kv, submit) == given.length
        assert not list(tmp_path.iterdir()), "it is taken once"
        kv.check([], [])
        assert kv.cached_length(CachedSequence(tokens=list(PROMPT))) == given.length
        arrived = bytes_of(taker, given.length)
        assert arrived == bytes_of(giver, given.length)
        [there] = taker.generate([list(PROMPT)], params)
        [here] = giver.generate([list(PROMPT)], params)
        assert there.token_ids == here.token_ids and there.logprobs == here.logprobs
        with icc.load(engines(kind), threads=1) as alone:
            [by_itself] = alone.generate([list(PROMPT)], params)
            assert bytes_of(alone, given.length) == arrived
            assert by_itself.token_ids == there.token_ids and by_itself.logprobs == there.logprobs


def test_parts_are_given_while_the_prompt_runs(engines: Callable[[str], Path], tmp_path: Path) -> None:
    """The blocks that a step completes are taken while the next steps run; at the end only the rest is left."""
    once = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=3)
    with icc.load(engines("llama"), threads=1) as giver, icc.load(engines("llama"), threads=1) as taker:
        source, target = transfer(giver, tmp_path), transfer(taker, tmp_path)
        [running_here] = taker.loop.add([9, 8, 7], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
        giver.loop.add(list(PROMPT), once)
        submit, lengths, name = Submit(1, PROMPT, once), list[int](), ""
        while giver.loop.has_work():
            giver.loop.step()
            if (given := source.give(giver.loop.scheduler.kv, submit)) is not None:
                name = given.name
                lengths.append(target.take_parts(taker.loop.scheduler.kv, name, b""))
            taker.loop.step()
        assert len(lengths) > 1 and min(lengths) > 0, lengths
        source.end(1)
        length = sum(lengths)
        assert length == taker.loop.scheduler.kv.cached_length(CachedSequence(tokens=list(PROMPT)))
        assert bytes_of(taker, length) == bytes_of(giver, length)
        assert target.take(taker.loop.scheduler.kv, Submit(2, PROMPT, params, takes_kv=name)) == 0  # everything is here
        assert not list(tmp_path.iterdir())
        [there] = taker.generate([list(PROMPT)], params)
        [here] = giver.generate([list(PROMPT)], params)
        assert there.token_ids == here.token_ids and there.logprobs == here.logprobs
        while taker.loop.has_work():
            taker.loop.step()
        assert running_here.finish_reason == "length"


def test_a_part_whose_beginning_was_pushed_out_is_not_taken(
    engines: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    once = SamplingParams(max_tokens=1)
    with icc.load(engines("llama"), threads=1) as giver, icc.load(engines("llama"), threads=1) as taker:
        source, target, name = transfer(giver, tmp_path), transfer(taker, tmp_path), ""
        giver.loop.add(list(PROMPT), once)
        while giver.loop.has_work():
            giver.loop.step()
            if (given := source.give(giver.loop.scheduler.kv, Submit(1, PROMPT, once))) is not None:
                if not name:
                    assert target.take_parts(taker.loop.scheduler.kv, given.name, b"") > 0
                name = given.name
        taker.loop.reset()  # an empty cache
        kv = taker.loop.scheduler.kv
        assert target.take(kv, Submit(2, PROMPT, once, takes_kv=name)) == 0
        assert "not here any more" in caplog.text and not any(len(group.cache) for group in kv.groups)


def test_what_is_not_taken(engines: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """KV of another prompt or engine, a file that is cut, is not ours or has a name that leads elsewhere: all are
    refused, and the prompt is computed."""
    params = SamplingParams(max_tokens=1)
    with icc.load(engines("llama"), threads=1) as giver, icc.load(engines("llama"), threads=1) as taker:
        giver.generate([list(PROMPT)], params)
        source, kv = transfer(giver, tmp_path), taker.loop.scheduler.kv

        def give() -> KVGiven:
            found = source.give(giver.loop.scheduler.kv, Submit(1, PROMPT, params))
            source.end(1)
            assert found is not None
            return found

        def taken(name: str, prompt: tuple[int, ...] = PROMPT, by: KVTransfer | None = None) -> int:
            by = by or transfer(taker, tmp_path)
            count = by.take(kv, Submit(2, prompt, params, takes_kv=name))
            assert kv.is_idle and (count or not any(len(group.cache) for group in kv.groups))
            return count

        assert taken(give().name, (*PROMPT[:20], 3, *PROMPT[21:])) == 0
        assert taken(give().name, PROMPT[:30]) == 0
        assert taken(give().name, by=KVTransfer(b"another", taker.executor, tmp_path)) == 0  # type: ignore[arg-type]
        assert "another engine, or one with another cache layout" in caplog.text
        cut = tmp_path / give().name
        cut.write_bytes(cut.read_bytes()[:-1])
        assert taken(cut.name) == 0
        (tmp_path / ("icc-kv-" + "0" * 32)).write_bytes(b"\x09" + bytes(30))
        assert taken("icc-kv-" + "0" * 32) == 0
        (tmp_path / "else").mkdir()
        real = tmp_path / give().name
        link = tmp_path / "else" / ("icc-kv-" + "1" * 32)
        link.symlink_to(real)
        assert taken(link.name, by=transfer(taker, tmp_path / "else")) == 0
        for name in (f"../{tmp_path.name}/{real.name}", "icc-kv-" + "2" * 32, ""):
            assert taken(name) == 0
        assert not source.give(kv, Submit(3, PROMPT, params))  # the taker has none of the prompt's KV
        assert not source.give(giver.loop.scheduler.kv, Submit(4, PROMPT, params, adapter="sql"))
        old = time.time() - 100
        os.utime(real, (old, old))
        source.sweep()
        assert not real.exists()
        assert taken(give().name) >= 32


def test_a_byte_that_has_changed_is_not_taken(
    toy_manifest: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The changed part is left out, and none of it is found later; the parts before it are taken."""
    params, prompt = SamplingParams(max_tokens=1, temperature=0), tuple(range(1, 40))
    giver, taker = (LLM(toy_manifest(), FakeExecutor(num_blocks=64, block_size=4, max_step_tokens=16)) for _ in "ab")
    source, target = transfer(giver, tmp_path), transfer(taker, tmp_path)
    giver.loop.add(list(prompt), params)
    sizes = list[int]()
    while giver.loop.has_work():
        giver.loop.step()
        if (given := source.give(giver.loop.scheduler.kv, Submit(1, prompt, params))) is not None:
            sizes.append(given.nbytes)
    assert len(sizes) > 1
    source.end(1)
    [path] = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    kv = taker.loop.scheduler.kv
    target.take(kv, Submit(2, prompt, params, takes_kv=path.name))
    assert "a block has changed on its way" in caplog.text and kv.is_idle
    assert 0 < kv.cached_length(CachedSequence(tokens=list(prompt))) < 36
    for llm in (giver, taker):
        llm.close()


def test_a_prompt_is_computed_by_one_server_and_answered_by_another(engines: Callable[[str], Path]) -> None:
    """As vllm-router does it: the first server computes one token, and its answer has the parameters for the second
    one."""
    engine = engines("llama")
    logs = [engine.parent / f"log{number}" for number in range(2)]
    with (
        running(serve_command(engine), logs[0], "llama") as first,
        running(serve_command(engine), logs[1], "llama") as second,
    ):
        asked = {"model": first.model, "prompt": list(PROMPT), "temperature": 0, "ignore_eos": True, "logprobs": 2}
        whole = first.complete(list(PROMPT)[::-1], max_tokens=9)
        assert "kv_transfer_params" not in whole
        nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        wish = {"do_remote_decode": True, "do_remote_prefill": False, **nothing}
        prefilled = first.ask("POST", "/v1/completions", asked | {"max_tokens": 1, "kv_transfer_params": wish}).json
        given = prefilled["kv_transfer_params"]
        assert given["do_remote_prefill"] and not given["do_remote_decode"] and given["remote_block_ids"]
        ask = asked | {"max_tokens": 12, "kv_transfer_params": given}
        there = second.ask("POST", "/v1/completions", ask).json
        assert there["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
        here = first.ask("POST", "/v1/completions", asked | {"max_tokens": 12}).json
        assert json.dumps(there["choices"]) == json.dumps(here["choices"])
        again = second.ask("POST", "/v1/completions", ask).json  # the KV is gone by now, but cached here
        assert json.dumps(again["choices"]) == json.dumps(here["choices"])
        lost = asked | {"prompt": list(PROMPT)[::-1], "max_tokens": 3}
        lost |= {"kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": "icc-kv-" + "0" * 32}}
        assert second.ask("POST", "/v1/completions", lost).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for server in (first, second):
            server.wait_until(server.idle)


def cached_tokens(answer: Any) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_router_names_the_server_that_computes_a_prompt(engines: Callable[[str], Path], tmp_path: Path) -> None:
    """x-prefiller-host-port may name only allowed servers; without the header, or if the server does not help, the
    prompt is computed here."""
    engine = engines("llama")
    with running(serve_command(engine), engine.parent / "log2", "llama") as first:
        address = f"127.0.0.1:{first.port}"
        command = serve_command(engine, "--prefiller", address, "--prefiller", "127.0.0.1:9")
        with running(command, engine.parent / "log3", "llama") as second:

            def ask(prompt: list[int], named: str | None, **more: Any) -> Any:
                body = {"model": "llama", "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 8}
                headers = {} if named is None else {HEADER: named}
                return second.ask("POST", "/v1/completions", body | more, headers)

            found = ask(list(PROMPT), address, n=2, logprobs=2).json
            assert cached_tokens(found) >= 32, found
            assert cached_tokens(first.complete(list(PROMPT), max_tokens=1)) >= 32  # it was computed there
            plain = first.ask("POST", "/v1/completions", {"model": "llama", "prompt": list(PROMPT), "temperature": 0,
                              "ignore_eos": True, "max_tokens": 8, "n": 2, "logprobs": 2}).json  # fmt: skip
            assert json.dumps(found["choices"]) == json.dumps(plain["choices"])
            assert cached_tokens(ask(list(PROMPT)[::-1], None).json) == 0
            assert cached_tokens(ask([7, *PROMPT], "127.0.0.1:9").json) == 0  # no server is there
            assert "computes no prompt" in second.log.read_text()
            refused = ask(list(PROMPT), "10.0.0.1:80")
            assert refused.status == 403 and "--prefiller" in refused.json["error"]["message"]
            ignored = first.ask("POST", "/v1/completions", {"model": "llama", "prompt": [5, 6], "max_tokens": 1},
                                {HEADER: "10.0.0.1:80"})  # fmt: skip
            assert ignored.status == 200
            for server in (first, second):
                server.wait_until(server.idle)


def test_servers_share_the_work_by_roles(engines: Callable[[str], Path]) -> None:
    """The server of role prefill computes long prompts and answers no requests itself. Short prompts are computed here,
    and so are those whose beginning is cached here; long ones too, once the other server is gone."""
    engine, prompt = engines("llama"), list(PROMPT)

    def ask(server: Any, tokens: list[int], **more: Any) -> Any:
        body = {"model": "llama", "prompt": tokens, "temperature": 0, "ignore_eos": True, "max_tokens": 8}
        return server.ask("POST", "/v1/completions", body | more)

    with icc.load(engine, threads=1) as alone:
        step = alone.manifest.limits.max_step_tokens
        assert step < len(prompt)
        [expected] = alone.generate([prompt], icc.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    with running(serve_command(engine, "--role", "prefill"), engine.parent / "log4", "llama") as prefill:
        refused = ask(prefill, [5, 6])
        assert refused.status == 400 and "--role prefill" in refused.json["error"]["message"]
        command = serve_command(engine, "--role", "decode", "--prefiller", f"127.0.0.1:{prefill.port}")
        with running(command, engine.parent / "log5", "llama") as decode:
            assert cached_tokens(ask(decode, prompt[:step]).json) == 0  # fits into a step
            assert cached_tokens(ask(decode, prompt[::-1]).json) > step
            assert ask(decode, prompt).json["choices"][0]["text"] == expected.text
            again = ask(prefill, prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True}).json
            assert cached_tokens(again) > step  # it was computed there
            asked = prefill.log.read_text().count("path=/v1/completions")
            assert cached_tokens(ask(decode, [*prompt, 5, 6]).json) > step  # most of it is cached here
            assert prefill.log.read_text().count("path=/v1/completions") == asked
            prefill.process.kill()
            prefill.process.wait()
            assert ask(decode, [7, *prompt]).json["usage"]["completion_tokens"] == 8
            assert "computes no prompt" in decode.log.read_text()
    for options, words in ((("decode",), "give --prefiller"), (("prefill", "--prefiller", "a:80"), "leave out")):
        done = subprocess.run(serve_command(engine, "--role", *options), capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr, done.stderr


def test_addresses_of_prefillers() -> None:
    """HOST:PORT and nothing else."""
    for text in ("host", "host:", ":80", "http://host:80", "a b:80", "host:123456"):
        with pytest.raises(UsageError, match="HOST:PORT"):
            Prefillers([text])


def test_kv_is_brought_from_another_host(engines: Callable[[str], Path], tmp_path: Path) -> None:
    """A file of KV arrives unchanged, and is removed at its source; only clients with a key may fetch it."""
    engine, key = engines("llama"), "a-key-of-thirty-two-characters-00"
    (tmp_path / "keys").write_text(key + "\n")
    command = serve_command(engine, "--api-key-file", str(tmp_path / "keys"))
    with running(command, tmp_path / "log", "llama", key) as server:
        address, memory = f"127.0.0.1:{server.port}", Path("/dev/shm")
        wish = {"do_remote_decode": True}
        asked = {"model": "llama", "prompt": list(PROMPT), "max_tokens": 1, "kv_transfer_params": wish}
        name = server.ask("POST", "/v1/completions", asked).json["kv_transfer_params"]["remote_engine_id"]
        shutil.copy(memory / name, tmp_path / "copy")
        for wrong, header in (
            (name, "Bearer no-key-of-this-server"),
            (name, ""),
            ("icc-kv-" + "0" * 32, f"Bearer {key}"),
        ):
            with pytest.raises(ValueError, match="it answers"):
                asyncio.run(KVFetcher(tmp_path).fetch(address, wrong, header))
        asyncio.run(KVFetcher(tmp_path).fetch(address, name, f"Bearer {key}"))
        assert (tmp_path / name).read_bytes() == (tmp_path / "copy").read_bytes()
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600 and not list(tmp_path.glob("*.part"))
        server.wait_until(lambda: not (memory / name).exists())
        with icc.load(engine, threads=1) as taker:
            kv = taker.loop.scheduler.kv
            taken = transfer(taker, tmp_path).take(kv, Submit(2, PROMPT, SamplingParams(), takes_kv=name))
            assert taken >= 32 and kv.cached_length(CachedSequence(tokens=list(PROMPT))) == taken
