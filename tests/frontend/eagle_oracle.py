"""Writes data/eagle_guesses.json: the guesses of the published code with tiny drafters.

    git clone https://github.com/vllm-project/speculators; git clone https://github.com/sgl-project/SpecForge
    PYTHONPATH=speculators/src:SpecForge:tests python tests/frontend/eagle_oracle.py

in a separate environment with the dependencies of both. The recorded guesses: speculators' and SpecForge's main of
September 2026, transformers 5.23, torch 2.13.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from eagle_models import CASES, TEXT, Drafter, config_of, save_eagle, target_of
from safetensors.torch import load_file

DATA = Path(__file__).parent / "data" / "eagle_guesses.json"


def by_specforge(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """(embeddings [1, T, H], taps [1, T, taps * H]) -> logits [1, T, draft vocabulary]."""
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    config.pop("pad_token_id", None)
    model = LlamaForCausalLMEagle3(LlamaConfig(**config, pad_token_id=0)).float().eval()
    missing, unknown = model.load_state_dict(tensors, strict=False)
    assert not unknown and set(missing) <= {"embed_tokens.weight", "t2d", "d2t"}, (missing, unknown)
    return lambda embedded, taps: model.lm_head(model(taps, embedded))


def by_speculators(config: dict[str, Any], tensors: dict[str, torch.Tensor], ids: torch.Tensor) -> Any:
    """As `by_specforge`, but for token ids [1, T], with the drafter's own embeddings."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from transformers import AutoConfig

    layer = config["transformer_layer_config"]
    text = AutoConfig.for_model(**layer)
    text._attn_implementation = "eager"
    names = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    own = {n: config[n] for n in (*names, "eagle_aux_hidden_state_layer_ids") if n in config}
    model = Eagle3DraftModel(Eagle3SpeculatorConfig(transformer_layer_config=text, **own)).float().eval()
    missing, unknown = model.load_state_dict(tensors, strict=False)
    assert not unknown and all(n.startswith("verifier") for n in missing), (missing, unknown)
    heads: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, result: heads.append(result))

    def run(embedded: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        model(taps, ids, torch.zeros_like(ids), ttt_steps=1)
        return heads[0]

    return run


def guesses(drafter: Drafter, folder: Path) -> list[int]:
    """The token that is guessed after each token of TEXT except the first."""
    target = target_of(drafter)
    save_eagle(drafter, target, folder)
    tensors = load_file(folder / "model.safetensors")
    config, ids = config_of(drafter, target.config), torch.tensor([TEXT])
    with torch.no_grad():
        states = target(input_ids=ids, output_hidden_states=True).hidden_states
        taps = torch.cat([states[n] for n in drafter.behind()], -1)[:, :-1]
        run = by_speculators(config, tensors, ids[:, 1:]) if drafter.speculators else by_specforge(config, tensors)
        found = run(target.get_input_embeddings()(ids[:, 1:]), taps)[0].argmax(-1)
    return (found + tensors["d2t"][found]).tolist() if "d2t" in tensors else found.tolist()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        wanted = sys.argv[1:] or list(CASES)
        found = json.loads(DATA.read_text()) if DATA.exists() else {}
        found |= {name: guesses(CASES[name], Path(folder, name)) for name in wanted}
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(json.dumps(found) + "\n")
