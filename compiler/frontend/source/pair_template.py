"""Finds how a chat template joins a query and a document, for a model that is asked whether they match.

Such a template knows the roles "query" and "document" (sentence-transformers 6; Qwen3-Reranker). The text around them
is found by rendering the template with marks in their places, so that an engine needs no template to join texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import UnsupportedModel

_QUERY, _DOCUMENT = " \ue000query\ue001 ", " \ue000document\ue001 "


def texts_around(model_dir: Path, prompt: str = "") -> tuple[str, ...]:
    """The texts before the query, between it and the document, and after the document; () if there is no chat template.

    prompt: the system message. UnsupportedModel if the template does anything but quote each text once.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedModel(f"{model_dir}: transformers reads no tokenizer there ({reason})") from error
    if not tokenizer.chat_template:
        return ()
    found = [
        _written(tokenizer, prompt, parts) for parts in (False, True)
    ]  # messages as plain strings, and as lists of parts
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
    """The template rendered with the marks; "" if it fails for this form of messages."""
    messages = [("system", prompt)] * bool(prompt) + [("query", _QUERY), ("document", _DOCUMENT)]
    given = [{"role": role, "content": [{"type": "text", "text": t}] if parts else t} for role, t in messages]
    try:
        return str(tokenizer.apply_chat_template(given, tokenize=False))
    except Exception:  # a template may raise anything
        return ""
