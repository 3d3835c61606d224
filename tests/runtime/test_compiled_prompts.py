"""`icc compile --prefix`: an engine contains the KV of system prompts; its answers are those without it, bit for
bit."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import icc
import pytest
import tokenizers
from click.testing import CliRunner
from icc.compiler.cli import main
from icc.runtime.commands.inspect import describe_engine
from icc.runtime.errors import EngineChangedError, UsageError
from icc.runtime.kv.sequence import CachedSequence
from icc.runtime.llm import LLM
from icc.runtime.options import LoadOptions
from icc.runtime.prefixes.blocks import KVBlocks, digest_of
from icc.runtime.prefixes.compiled import PromptsOfEngine
from icc.runtime.prefixes.kept import KeptPrompts
from icc.runtime.prefixes.store import PromptStore
from icc.runtime.requests.params import SamplingParams
from icc.runtime.requests.request import Standing
from icc.runtime.server.engine import worker_main
from icc.runtime.server.log import LogOptions
from sizes import SOAK

TURN = "w1 {{ message['content'] }} w2 "
TEMPLATE = "{% for message in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}w3{% endif %}"
SYSTEM = " ".join(f"w{5 + (7 * n) % 110}" for n in range(70))
OTHERS = [
    "gemma3",
    "qwen3_next-delta_rule",
    "deepseek_v3-latent_grouped_routing",
    "llama+f32",
    "llama+int4",
]
KINDS = ["llama", "lfm2-short_convolutions", *(OTHERS if SOAK else [])]
Make = Callable[..., Path]


def save_model(tiny: Any, folder: Path, name: str) -> None:
    tiny.save_tiny(tiny.tiny_configs()[name], folder)
    with_template(folder, TEMPLATE)


@pytest.fixture(scope="module")
def engines(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Compiles a tiny model of a kind, once, with a compiled prompt; its tokens are words."""
    folder, made = tmp_path_factory.mktemp("prompts"), dict[str, Path]()
    (folder / "system.txt").write_text(SYSTEM)

    def make(kind: str) -> Path:
        if kind not in made:
            name, _, numbers = kind.partition("+")
            save_model(tiny, folder / kind, name)
            limits = {"max_step_tokens": 24, "max_batch_size": 6, "max_seq_len": 128}  # as test_same_bits: built once
            given: Any = {"target": "native", "quant": "rtn4", "kv_cache": numbers or "auto", **limits}
            made[kind] = icc.compile(folder / kind, folder / f"{kind}.engine", prefix=[folder / "system.txt"], **given)
        return made[kind]

    return make


@contextlib.contextmanager
def without(engine: Path) -> Iterator[LLM]:
    """Load the engine without its compiled prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptsOfEngine, "of", lambda engine: None)
        with icc.load(engine, threads=1) as llm:
            yield llm


def compiled(engine: Path) -> Any:
    [found] = json.loads((engine / "prompts.json").read_text())["prompts"]
    return found


GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=3)


def answer(llm: LLM, prompt: Sequence[int], salt: bytes = b"") -> tuple[list[int], Any, int, bytes]:
    """The tokens, their log-probabilities, the number of cached tokens, and the bits of the first logits."""
    [one] = llm.loop.add(prompt, GREEDY, Standing(salt=salt))
    first = b""
    while one.finish_reason is None:
        llm.loop.step()
        if not first and one.sampled:
            executor: Any = llm.executor
            first = executor.device.logits[0].tobytes()
    completion = one.completion()
    return list(completion.token_ids), completion.logprobs, one.num_cached_tokens or 0, first


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_an_engine_without(kind: str, engines: Make) -> None:
    facts = compiled(engines(kind))
    assert facts["kind"] == "system" and facts["length"] >= 64
    with icc.load(engines(kind), threads=1) as llm, without(engines(kind)) as plain:
        prompt = llm.prompting.encode_chat(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "w9 w8 w7"}]
        )
        assert prompt[: len(facts["tokens"])] == facts["tokens"]
        for salt in (b"", b"a tenant"):  # a server gives each client a salt
            *found, cached, bits = answer(llm, prompt, salt)
            *wanted, none, own_bits = answer(plain, prompt, salt)
            assert (cached, none) == (facts["length"], 0)
            assert found == wanted and bits == own_bits, salt
        llm.loop.scheduler.check()
        assert llm.loop.scheduler.kv.is_idle
        kept = llm.loop.scheduler.kv.found(CachedSequence(tokens=prompt), facts["length"])
        assert kept is not None and all(kept)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_has_them_after_it_has_checked_its_answers(
    kind: str, engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Canary prompts use the cache's first blocks, which compiled prompts occupy afterwards."""
    prompt, found = [*compiled(engines(kind))["tokens"], 9, 8], list[Any]()

    class Asked:
        def __init__(self, llm: LLM, *_: Any) -> None:
            found.append(answer(llm, prompt))

        def run(self, load_s: float) -> None:
            assert load_s

    monkeypatch.setattr(worker_main, "Worker", Asked)
    monkeypatch.setattr(worker_main, "die_with_parent", lambda: None)
    monkeypatch.setattr(worker_main, "configure", lambda options: None)
    ours, theirs = socket.socketpair()
    with ours:
        options = LoadOptions(engines(kind), threads=1)
        assert worker_main.main([str(theirs.detach()), options.to_json(), LogOptions().to_text()]) == 0
    with without(engines(kind)) as plain:
        wanted = answer(plain, prompt)
    [(tokens, logprobs, cached, bits)] = found
    assert cached and (tokens, logprobs, bits) == (wanted[0], wanted[1], wanted[3])


def test_a_compile_again_gives_the_same(engines: Make) -> None:
    """`icc verify --rebuild` does not need the file of --prefix: the engine contains the prompt."""
    engine = engines("llama")
    done = CliRunner().invoke(main, ["verify", str(engine), "--rebuild", str(engine.parent / "llama")])
    assert done.exit_code == 0 and "gives the same engine" in done.output, done.output


def test_nothing_of_the_prefix_is_computed(engines: Make) -> None:
    facts = compiled(engines("llama"))
    with icc.load(engines("llama"), threads=1) as llm:
        assert not llm.loop.has_work()
        llm.loop.add([*facts["tokens"], 9, 8], SamplingParams(max_tokens=1))
        ran = 0
        while llm.loop.has_work():
            llm.loop.step()
            ran += llm.loop.last_step_tokens
        assert ran == len(facts["tokens"]) + 2 - facts["length"] < 24
        llm.loop.add([*facts["tokens"][:40], 9, 8], SamplingParams(max_tokens=1))  # its beginning is found, too
        llm.loop.step()
        size = llm.loop.scheduler.kv.multiple
        assert llm.loop.last_step_tokens == 42 - 40 // size * size


def test_it_is_never_evicted_and_clients_stay_apart(engines: Make) -> None:
    facts = compiled(engines("llama"))
    with icc.load(engines("llama"), threads=1) as llm:
        others = [[(3 * n + k) % 110 + 5 for n in range(100)] for k in range(40)]
        llm.generate(others, SamplingParams(max_tokens=2, ignore_eos=True))
        prompt = [*facts["tokens"], *range(10, 40)]
        assert answer(llm, prompt, b"one")[2] == facts["length"]
        assert answer(llm, prompt, b"one")[2] > facts["length"]  # the prompt's own tokens
        assert answer(llm, prompt, b"two")[2] == facts["length"], "another client's words are found"
        llm.loop.scheduler.check()


def test_it_is_there_in_a_cache_that_was_made_anew(engines: Make) -> None:
    facts = compiled(engines("llama"))
    with icc.load(engines("llama"), threads=1) as llm:
        llm.loop.reset()
        assert answer(llm, [*facts["tokens"], 9])[2] == facts["length"]


def test_a_request_may_fill_the_rest_of_the_cache(engines: Make) -> None:
    """Compiled prompts have extra blocks: requests of full length run as without them."""
    with icc.load(engines("llama"), threads=1) as llm:
        with without(engines("llama")) as plain:
            for group, other in zip(llm.loop.scheduler.kv.groups, plain.loop.scheduler.kv.groups, strict=True):
                assert group.num_lent == other.pool.num_blocks
        prompts = [[(3 * n + k) % 110 + 5 for n in range(100)] for k in range(6)]
        found = llm.generate(prompts, SamplingParams(max_tokens=28, ignore_eos=True))
        assert [len(one.token_ids) for one in found] == [28] * 6 and llm.loop.scheduler.num_preemptions == 0


def test_other_kernels_compute_it_when_loaded(engines: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of another level may round differently, so that their prompts' KV is not taken from the engine."""
    facts = compiled(engines("llama"))
    monkeypatch.setattr(PromptsOfEngine, "fits", lambda self, identity: False)
    with icc.load(engines("llama"), threads=1) as llm, without(engines("llama")) as plain:
        prompt = [*facts["tokens"], 9, 8]
        *found, cached, bits = answer(llm, prompt)
        *wanted, _, own_bits = answer(plain, prompt)
        assert cached == facts["length"] and found == wanted and bits == own_bits


def test_a_changed_file_is_refused(engines: Make, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(engines("llama"), tmp_path / "engine")
    file = tmp_path / "engine" / compiled(engines("llama"))["file"]
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with pytest.raises(EngineChangedError, match=r"prompts/0\.kv"):
        icc.load(tmp_path / "engine")


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_prompt_comes_back_from_disk(kind: str, engines: Make, tmp_path: Path) -> None:
    """Requests ask to keep a prompt; also with recurrent states, and where no compiled prompt is used."""
    first = run_kept(engines(kind), tmp_path)
    second = run_kept(engines(kind), tmp_path)
    assert first[0] == 0 < 32 <= second[0] <= 50
    assert first[1:] == second[1:]


def run_kept(engine: Path, folder: Path) -> tuple[int, Any, Any]:
    """Load the engine, and keep a prompt in a folder or find it there: the number of cached tokens, and the answer."""
    prompt = [5 + (7 * n) % 110 for n in range(100)]
    end, there = time.monotonic() + 20, list[bool]()
    with without(engine) as llm:
        blocks = KVBlocks(digest_of(llm.manifest), llm.executor)  # type: ignore[arg-type]
        store = PromptStore(folder, blocks.identity, 1 << 30)
        kept = KeptPrompts(lambda: llm.loop.scheduler.kv, 128, blocks, store)
        stored = kept.fetch(CachedSequence(tokens=list(prompt)), lambda: there.append(True))
        while stored and not there:
            assert time.monotonic() < end
            kept.turn()
        kept.keep(CachedSequence(tokens=list(prompt)), 50, 300)
        [one] = llm.loop.add(prompt, GREEDY, Standing(first_turn=50))
        while one.finish_reason is None or not list(folder.glob("*.kv")):
            assert time.monotonic() < end
            llm.loop.step()
            kept.turn()
        assert kept.num_kept == 1
        completion = one.completion()
        return one.num_cached_tokens or 0, completion.token_ids, completion.logprobs


def test_inspect_shows_it(engines: Make) -> None:
    facts = compiled(engines("llama"))
    [row] = describe_engine(engines("llama"))["prompts"]  # type: ignore[misc]
    size = size_of_kv(engines("llama"), facts)
    assert row == {
        "file": "system.txt",
        "is": "system",
        "tokens": len(facts["tokens"]),
        "kept_tokens": facts["length"],
        "kv_bytes": size,
    }


def test_a_refit_computes_it_for_its_own_weights(tiny: Any, engines: Make, tmp_path: Path) -> None:
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path / "other", seed=1)
    with_template(tmp_path / "other", TEMPLATE)
    engine = icc.refit(engines("llama"), tmp_path / "other", tmp_path / "other.engine")
    old, new = compiled(engines("llama")), compiled(engine)
    assert new == old
    assert (engine / new["file"]).read_bytes() != (engines("llama") / old["file"]).read_bytes()
    with icc.load(engine, threads=1) as llm, without(engine) as plain:
        *found, cached, bits = answer(llm, [*new["tokens"], 9, 8])
        *wanted, _, own_bits = answer(plain, [*new["tokens"], 9, 8])
        assert cached == new["length"] and found == wanted and bits == own_bits


def test_a_delta_computes_those_of_its_base(
    tiny: Any, engines: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """When it is loaded; a delta that is given a prompt itself contains the KV of its base's prompts, too."""
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path / "other", seed=1)
    with_template(tmp_path / "other", TEMPLATE)
    (tmp_path / "more.txt").write_text(" ".join(reversed(SYSTEM.split())))
    base, old = engines("llama"), compiled(engines("llama"))
    caplog.set_level(logging.WARNING, "icc.compile")
    delta = icc.compile(tmp_path / "other", tmp_path / "delta.engine", like=base)
    assert "the delta computes it whenever it is loaded" in caplog.text
    [row] = describe_engine(delta)["prompts"]  # type: ignore[misc]
    assert row["kv_bytes"] == "computed when loaded" and "prompts_computed_by" not in describe_engine(delta)
    with icc.load(delta, threads=1) as llm, without(delta) as plain:
        *found, cached, bits = answer(llm, [*old["tokens"], 9, 8])
        *wanted, _, own_bits = answer(plain, [*old["tokens"], 9, 8])
        assert cached == old["length"] and found == wanted and bits == own_bits
    more = [base.parent / "system.txt", tmp_path / "more.txt"]
    caplog.clear()
    own = icc.compile(tmp_path / "other", tmp_path / "own.engine", like=base, prefix=more[1:])
    again = icc.compile(tmp_path / "other", tmp_path / "again.engine", like=base, prefix=more)
    assert "whenever it is loaded" not in caplog.text
    for engine in (own, again):
        rows: Any = describe_engine(engine)["prompts"]
        assert [row["file"] for row in rows] == ["system.txt", "more.txt"]
        assert all(row["kv_bytes"] == size_of_kv(base, old) for row in rows)


def size_of_kv(engine: Path, facts: Any) -> int:
    return (engine / facts["file"]).stat().st_size


def tokens_of(folder: Path, name: str, content: str) -> Any:
    from icc.compiler.measure import read_prompts
    from icc.compiler.prompt_files import read_prompt_file

    (folder / name).write_text(content)
    [found] = read_prompts([read_prompt_file(folder / name)], folder)
    return found


def with_template(folder: Path, template: str) -> Path:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(120)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def test_a_text_is_the_system_message_and_messages_are_messages(tmp_path: Path) -> None:
    folder = with_template(tmp_path, TEMPLATE)
    found = tokens_of(folder, "a.txt", "w20 w21")
    assert (found.kind, found.tokens) == ("system", (1, 20, 21, 2, 1))
    shot = [{"role": "system", "content": "w20"}, {"role": "user", "content": "w30"}]
    found = tokens_of(folder, "b.json", json.dumps([*shot, {"role": "assistant", "content": "w31"}]))
    assert (found.kind, found.tokens) == ("messages", (1, 20, 2, 1, 30, 2, 1, 31, 2, 1))
    found = tokens_of(folder, "c.json", json.dumps(shot))  # it may be a whole conversation
    assert found.tokens == (1, 20, 2, 1, 30, 2)


def test_without_a_template_it_is_a_text(tmp_path: Path) -> None:
    found = tokens_of(with_template(tmp_path, ""), "a.txt", "w20 w21 ")
    assert (found.kind, found.tokens) == ("text", (20, 21))
    with pytest.raises(UsageError, match="no chat template for messages"):
        tokens_of(tmp_path, "b.json", '[{"role": "user", "content": "w3"}]')


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }} {% endif %}{% endfor %}"
         "{{ messages[0]['content'] }}", "behind or within what users say"),
        ("{{ strftime_now('%d %b %Y') }}" + TEMPLATE, "writes the date in front of it"),
        ("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}", "no system"),
    ],
)  # fmt: skip
def test_what_prompts_do_not_begin_with_is_refused(template: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        tokens_of(with_template(tmp_path, template), "a.txt", "w20 w21")
    assert "a.txt" in caught.value.message and "\n" not in caught.value.message


def test_a_template_that_moves_it_later_is_told_of(tmp_path: Path) -> None:
    moving = (
        "{% for m in messages[1:] %}w1 {% if loop.last %}{{ messages[0]['content'] }} {% endif %}{{ m['content'] }}"
        " {% endfor %}"
    )
    found = tokens_of(with_template(tmp_path, moving), "a.txt", "w20 w21")
    assert found.tokens == (1, 20, 21) and "first turns alone begin with it" in found.warning


def test_mistakes_are_told_before_the_compile(engines: Make, tmp_path: Path) -> None:
    from icc.compiler.prompt_files import read_prompt_file

    with pytest.raises(UsageError, match="no such file"):
        read_prompt_file(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(UsageError, match="is empty"):
        read_prompt_file(tmp_path / "empty.txt")
    for text, why in (
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "no list of messages"),
        ('[{"role": 1}]', "no list of messages"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UsageError, match=why):
            read_prompt_file(tmp_path / "bad.json")


def test_too_short_too_long_or_of_a_task_without_it(
    tiny: Any, engines: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    model = engines("llama").with_name("llama")
    (tmp_path / "short.txt").write_text("w7")
    (tmp_path / "long.txt").write_text(" ".join(["w7"] * 130))
    for name, why in (("short.txt", "a block of the KV cache holds"), ("long.txt", "longest sequence")):
        with pytest.raises(UsageError, match=why):
            icc.compile(model, tmp_path / "engine", target="native", max_seq_len=128, prefix=[tmp_path / name])
    with pytest.raises(UsageError, match="keeps none"):
        icc.compile(model, tmp_path / "engine", task="embed", prefix=[tmp_path / "long.txt"])
    with pytest.raises(UsageError, match="drops tokens"):
        icc.compile(model, tmp_path / "engine", kv_policy="h2o:budget=64,recent=8", prefix=[tmp_path / "long.txt"])
    assert not (tmp_path / "engine").exists()
