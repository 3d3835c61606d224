"""How a chat template puts a query and a document together, for a model that is asked whether they match.

Such a template knows the roles "query" and "document" (sentence-transformers 6; Qwen3-Reranker). What it writes around
the two texts is found by having it write marks in their places, so that an engine needs no template to join texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import UnsupportedModel

_QUERY, _DOCUMENT = " \ue000query\ue001 ", " \ue000document\ue001 "


def texts_around(model_dir: Path, prompt: str = "") -> tuple[str, ...]:
    """What comes before the query, between it and the document, and behind; () where there is no chat template.

    prompt: the system's message. UnsupportedModel where the template does more with the texts than to quote them once.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedModel(f"{model_dir}: transformers reads no tokenizer there ({reason})") from error
    if not tokenizer.chat_template:
        return ()
    found = [_written(tokenizer, prompt, parts) for parts in (False, True)]  # plain strings, or lists of parts
    whole = next((text for text in found if text.count(_QUERY) == text.count(_DOCUMENT) == 1), "")
    before, _, rest = whole.partition(_QUERY)
    between, is_behind, after = rest.partition(_DOCUMENT)
    if not is_behind:
        raise UnsupportedModel(
            f"the chat template in {model_dir} does not write a query and then a document as they are",
            "it must quote the messages of the roles 'query' and 'document' once each",
        )
    return before, between, after


def _written(tokenizer: Any, prompt: str, parts: bool) -> str:
    """What the template makes of the marks; "" if it cannot take them so."""
    messages = [("system", prompt)] * bool(prompt) + [("query", _QUERY), ("document", _DOCUMENT)]
    given = [{"role": role, "content": [{"type": "text", "text": t}] if parts else t} for role, t in messages]
    try:
        return str(tokenizer.apply_chat_template(given, tokenize=False))
    except Exception:  # whatever a template may raise
        return ""
