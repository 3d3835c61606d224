"""A check for schemathesis: valid data is accepted, or refused for one of the few reasons that no schema can say.

It stands in for the check `positive_data_acceptance`, which knows statuses only.
"""

from __future__ import annotations

import re

import schemathesis

UNSAID = re.compile(
    r"the prompt has \d+ tokens, the (model|engine) takes at most \d+"  # a schema counts characters
    r"|the request is for \d+ completions and \d+ tokens, this server takes at most"  # nor does it multiply fields
    r"|the chat template refuses these messages"
    r"|a response_format decides itself when the answer ends"  # with ignore_eos or min_tokens
    r"|takes more than [\d.]+ s"
)
GRAMMAR_FIELDS = ("response_format", "tools")  # a text may be no grammar, a schema no schema that can be followed


@schemathesis.check
def accepts_valid_data(ctx, response, case) -> None:
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    if response.status_code in (200, 404):
        return
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] in ("unprocessable", "too_expensive"), error
    assert UNSAID.match(error["message"]) or error["param"].startswith(GRAMMAR_FIELDS), error
