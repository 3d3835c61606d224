"""Encoders: tokens attend to later ones, a sequence runs in one step, and nothing is cached."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
from icc.compiler.errors import UnsupportedModel
from icc.compiler.frontend.ending import DenseLayer, Ending
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.weights.handles import Constant
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.runtime.errors import RequestError
from sizes import soak

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 60,
    "max_position_embeddings": 70,
}  # fmt: skip
DISTILLED = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 48, "vocab_size": 60, "max_position_embeddings": 70}
MODERN = {"local_attention": 8, "pad_token_id": 0, "num_hidden_layers": 3, "classifier_pooling": "mean"}
GEMMA = {
    "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8, "use_bidirectional_attention": True,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
T5 = {
    "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "vocab_size": 60,
    "decoder_start_token_id": 0,
}  # fmt: skip
DEBERTA = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "share_att_key": True,
    "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0, "num_hidden_layers": 1,
}  # fmt: skip
# a configuration class of transformers, and its arguments besides SIZES
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", {}),
    "roberta": ("XLMRobertaConfig", {"type_vocab_size": 1}),  # positions count from the padding token's id + 1
    "mpnet": ("MPNetConfig", {}),  # a bias by distance, and a padding token that is not the configuration's
    "deberta": ("DebertaV2Config", DEBERTA),  # biases of queries and of keys by distance
    "squeezebert": ("SqueezeBertConfig", {"embedding_size": 32}),  # grouped products, as convolutions of one tap
    "layoutlm": ("LayoutLMConfig", {}),  # its own attention mask
    "distilbert": ("DistilBertConfig", DISTILLED),
    "modernbert": ("ModernBertConfig", MODERN),  # windows on both sides
    "gemma": ("Gemma3TextConfig", GEMMA),
    "t5": ("T5Config", T5),  # the encoder half
    "llama": ("LlamaConfig", {"pad_token_id": 0}),  # a decoder that scores
}
TOKENS = 23


def saved(kind: str, path: Path, task: str, **more: Any) -> Any:
    """A random model of a kind, written to `path`."""
    import torch
    import transformers

    name, own = KINDS[kind]
    config = getattr(transformers, name)(**({} if kind in ("distilbert", "t5") else SIZES) | own | more)
    torch.manual_seed(0)
    embeds = transformers.AutoModelForTextEncoding if kind == "t5" else transformers.AutoModel
    build = embeds if task == "embed" else transformers.AutoModelForSequenceClassification
    model = build.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(path)
    return model


def ids_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(5, 60, length).tolist()


def run_model(model: Any, ids: list[int], types: list[int] | None = None) -> Any:
    """The output of transformers: hidden states [T, H], or scores [labels]."""
    import torch

    given = {"token_type_ids": torch.tensor([types])} if types else {}
    with torch.no_grad():
        out = model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **given)
    return out.logits[0] if hasattr(out, "logits") else out.last_hidden_state[0]


def through_passes(graph: Any) -> Any:
    run_passes(graph, [*pipelines.canonicalize(), *pipelines.attention(), *pipelines.fuse()], PassContext())
    return graph


@pytest.mark.parametrize(
    "kind",
    [
        "roberta",
        "mpnet",
        "deberta",
        *soak("t5", "bert", "squeezebert", "layoutlm", "distilbert", "modernbert", "gemma"),
    ],
)
def test_the_graph_has_the_hidden_states_of_the_model(kind: str, tmp_path: Path) -> None:
    """The row of the first token, or a dense layer after the mean of all rows."""
    import torch

    model = saved(kind, tmp_path, "embed")
    weight, bias = torch.randn(16, 32), torch.randn(16)
    ending = Ending(True, (DenseLayer(Constant(weight), Constant(bias), "tanh"),)) if kind != "roberta" else Ending()
    graph = through_passes(load_graph(tmp_path, task="embed", ending=ending))
    assert graph.looks_ahead and graph.max_seq_len == {"roberta": 68, "mpnet": 68, "t5": 4096}.get(kind, 70)
    hidden = run_model(model, ids_of(TOKENS))
    expected = torch.tanh(hidden.mean(0) @ weight.T + bias)[None] if kind != "roberta" else hidden[:1]
    found = interpret(graph, ids_of(TOKENS), [0])
    np.testing.assert_allclose(found, expected, atol=3e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["modernbert", "llama", *soak("bert", "roberta", "mpnet", "distilbert", "gemma")])
def test_the_graph_has_the_scores_of_the_model(kind: str, tmp_path: Path) -> None:
    import torch

    model = saved(kind, tmp_path, "rerank", num_labels=2)
    graph = through_passes(load_graph(tmp_path, task="rerank"))
    ids, types = ids_of(TOKENS), [0] * 10 + [1] * 13
    assert [array.name for array in graph.declared] == (["token_type_ids"] if kind == "bert" else [])
    row = 0 if graph.picked == "first" else TOKENS - 1
    found = interpret(graph, ids, [row], extras={"token_type_ids": torch.tensor(types)})[0]
    expected = run_model(model, ids, types if graph.declared else None)
    np.testing.assert_allclose(found, expected, atol=3e-5 * float(expected.abs().max()))


def test_an_engine_embeds_whole_prompts(tmp_path: Path) -> None:
    """Prompts of odd lengths, more than a batch: bit-equal alone and together."""
    model = saved("bert", tmp_path, "embed", num_hidden_layers=1)
    icc.compile(tmp_path, tmp_path / "x.engine", task="embed", target="native", max_batch_size=4, max_step_tokens=16)
    prompts = [ids_of(length) for length in (1, 2, 23, 40, 70, 17, 33)]
    hidden = [run_model(model, prompt).mean(0) for prompt in prompts]
    with icc.load(tmp_path / "x.engine", threads=1, verify_answers=True) as llm:
        found = llm.embed(prompts)
        expected = np.stack([row / row.norm() for row in hidden])
        np.testing.assert_allclose(found, expected, atol=1e-6)
        assert all((llm.embed([prompt])[0] == row).all() for prompt, row in zip(prompts, found, strict=True))
        assert llm.loop.scheduler.kv.is_idle and llm.manifest.limits.max_step_tokens == 70
        [group] = llm.executor.device.program.kv.groups  # type: ignore[attr-defined]
        assert group.keeps == "step" and len(group.layers) == 2, "layers share what they need within a step"


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"which word is here the first one last never said a b c d e f g".split()]


def write_tokenizer(path: Path) -> None:
    """Write a tokenizer of whole words, with BERT's template for pairs."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors

    made = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(WORDS[:4])
    made.save(str(path / "tokenizer.json"))


def test_an_engine_scores_pairs_of_texts(tmp_path: Path) -> None:
    """Scores also depend on the token types that the tokenizer gives; of two labels, the second means a good pair."""
    import torch

    model = saved("bert", tmp_path, "rerank", num_hidden_layers=1, num_labels=2)
    write_tokenizer(tmp_path)
    engine = icc.compile(tmp_path, tmp_path / "x.engine", task="rerank", target="native", max_batch_size=4)
    query, documents = "which word is first", ["the first word", "a b c d e f g " * 5, "never said", "one"]
    rows = []
    for document in documents:
        first, second = ([WORDS.index(word) for word in text.split()] for text in (query, document))
        ids, types = [2, *first, 3, *second, 3], [0] * (len(first) + 2) + [1] * (len(second) + 1)
        rows.append(run_model(model, ids, types))
    wanted = torch.stack(rows).softmax(-1)[:, 1]
    with icc.load(engine, threads=1) as llm:
        found = llm.rerank(query, documents)
        assert [one.index for one in found] == wanted.argsort(descending=True).tolist()
        assert [one.score for one in found] == pytest.approx(wanted.sort(descending=True).values.tolist(), abs=1e-5)
        assert llm.rerank(query, documents, top_n=2) == found[:2] and found[0].document == documents[found[0].index]
        with pytest.raises(RequestError, match="at most 70"):
            llm.rerank(query, ["a " * 100])
        [cut], [short] = llm.rerank(query, ["a " * 100], truncate=True), llm.rerank(query, ["a " * (70 - 3 - 4)])
        assert cut.score == short.score
        for call in (lambda: llm.embed(["a"]), lambda: llm.generate(["a"])):
            with pytest.raises(RequestError, match="to score texts"):
                call()

    async def ask() -> Any:
        async with icc.load_async(engine, threads=1) as llm:
            return await llm.rerank(query, documents)

    assert asyncio.run(ask()) == found


TEMPLATE = (
    "{{ messages[0].content }} {{ (messages | selectattr('role', 'eq', 'query') | first).content }} is "
    "{{ (messages | selectattr('role', 'eq', 'document') | first).content }} [SEP] here"
)


def test_words_tell_a_score(tmp_path: Path) -> None:
    """As in sentence-transformers' LogitScore: the difference of two logits of the next token."""
    import torch
    import transformers
    from icc.compiler.frontend.source.pair_template import texts_around
    from icc.compiler.frontend.source.scoring import read_scoring
    from icc.runtime.tokenizer import Tokenizer

    config = transformers.Gemma2Config(**SIZES, head_dim=16, num_key_value_heads=1, final_logit_softcapping=3.0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.LogitScore", "path": "1_LogitScore"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_LogitScore").mkdir()
    (tmp_path / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": 9, "false_token_id": 5}))
    prompts = {"prompts": {"query": "which word"}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    graph = load_graph(tmp_path, task="rerank")
    logits = run_model(model, ids_of(TOKENS))[-1]
    found = interpret(graph, ids_of(TOKENS))
    assert found.shape == (TOKENS, 1)
    assert float(found[-1]) == pytest.approx(float(logits[9] - logits[5]), abs=1e-5)

    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    about = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    around = texts_around(tmp_path, read_scoring(tmp_path).prompt)
    assert around == ("which word ", " is ", " [SEP] here")
    tokenizer = Tokenizer((tmp_path / "tokenizer.json").read_bytes())
    texts = ("said a", "b c d e"), "which word said a is b c d e [SEP] here".split()
    assert tokenizer.encode_between(around, texts[0]) == [WORDS.index(word) for word in texts[1]]
    cut = tokenizer.encode_between(around, texts[0], longest=8)
    assert cut == [WORDS.index(word) for word in "which word said a is b [SEP] here".split()]
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1].content | trim }}")
    with pytest.raises(UnsupportedModel, match="does not write a query and then a document"):
        texts_around(tmp_path)


@pytest.mark.soak
def test_an_encoder_generates_nothing(tmp_path: Path) -> None:
    saved("gemma", tmp_path, "embed")  # other checkpoints of this type decode
    with pytest.raises(UnsupportedModel, match="bidirectional") as refused:
        icc.compile(tmp_path, tmp_path / "x.engine")
    assert "--task embed" in refused.value.hint
