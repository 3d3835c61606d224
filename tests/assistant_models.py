"""Tiny Gemma 4 models with assistants that read their keys and values, and the guesses of transformers' own
assistants."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from icc.compiler.frontend.assistant import all_layers_may_share
from tiny_models import GQA, save_tiny

WINDOW = 8
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
TARGET = {
    **GQA, "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW, "num_hidden_layers": 6,
    "layer_types": KINDS * 2, "vocab_size_per_layer_input": 120, "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2, "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
}  # fmt: skip
OWN = {
    **GQA, "hidden_size": 48, "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW, "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"], "num_kv_shared_layers": 3,
    "vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0, "intermediate_size": 80,
}  # fmt: skip


# A pair of each form: like the published small models; an assistant that scores the tokens of some clusters only; a
# model whose layers share no keys and values, and whose values are the keys in some layers.
ONE_HEAD = {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # changes of the three
    "shared": ({}, {}, {}),
    "clusters": ({}, {}, {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3}),
    "unshared": ({"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, **ONE_HEAD}, ONE_HEAD, {}),
}


def save_pair(case: str, path: Path) -> Reference:
    """Write a pair of a form: its model to `path`/model, its assistant to `path`/drafter."""
    theirs, text, own = CASES[case]
    target = save_target(path / "model", **theirs)
    return Reference(target, save_assistant(target, path / "drafter", text, **own))


def save_target(path: Path, **changes: Any) -> Any:
    """transformers' model, written to `path`. Its layers add little to the embeddings, which are also its LM head, so
    tokens tend to repeat."""
    import transformers as t

    model = save_tiny(t.Gemma4TextConfig(**TARGET | changes), path)
    return _calmed(model, path)


def save_assistant(target: Any, path: Path, own: dict[str, Any], **changes: Any) -> Any:
    """transformers' assistant for `target`, written to `path`: it mostly guesses that tokens repeat."""
    import transformers as t

    text = t.Gemma4TextConfig(**OWN | own)
    config = t.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=64, **changes)
    with all_layers_may_share(t.Gemma4TextConfig):
        model = save_tiny(config, path, seed=5)
    narrow = torch.linalg.qr(torch.randn(64, 48, generator=torch.Generator().manual_seed(7))).Q.T
    table = target.get_input_embeddings().weight
    model.lm_head.weight.data = table.detach() @ narrow.T
    model.model.embed_tokens.weight = model.lm_head.weight
    model.pre_projection.weight.data = torch.cat([0.3 * narrow, narrow], 1) + 0.02 * model.pre_projection.weight.data
    model.post_projection.weight.data = narrow.T + 0.02 * model.post_projection.weight.data
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.9)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(120, generator=torch.Generator().manual_seed(9)))
    return _calmed(model, path)


def _calmed(model: Any, path: Path) -> Any:
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.data *= 0.5
    model.save_pretrained(path)
    return model


@dataclass
class Reference:
    """transformers' candidates after a model has read a text: from its own generator, with the keys of its window."""

    target: Any
    assistant: Any

    def chain(self, text: list[int], count: int) -> list[int]:
        """The `count` guesses after a text."""
        return self.logits(text, count).argmax(-1).tolist()

    def logits(self, text: list[int], count: int) -> torch.Tensor:
        """The logits [count, vocab] from which the guesses after a text are chosen."""
        from transformers import DynamicCache, GenerationConfig
        from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

        self.assistant.generation_config.num_assistant_tokens = count
        embedding = self.target.get_input_embeddings()
        found = SinglePositionMultiTokenCandidateGenerator(self.assistant, embedding, GenerationConfig(max_length=512))
        with torch.no_grad():
            read = self.target(
                input_ids=torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True,
                use_cache=True, past_key_values=DynamicCache(),
            )  # fmt: skip
            shared = dict(read.shared_kv_states)
            if not shared:  # transformers gives them of models that share them among their own layers, too
                layers = dict(zip(self.target.config.layer_types, read.past_key_values.layers, strict=True))
                shared = {kind: (layer.keys, layer.values) for kind, layer in layers.items()}
            keys, values = shared["sliding_attention"]
            read.shared_kv_states = shared | {"sliding_attention": (keys[:, :, -WINDOW:], values[:, :, -WINDOW:])}
            ids = torch.tensor([text])
            _, logits = found.get_candidates(ids, {}, read, is_first_iteration=False, n_last_matches=0)
        return logits[0]
