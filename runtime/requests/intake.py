"""Intake: checks requests before they are queued, and makes their Generations."""

from __future__ import annotations

from collections.abc import Sequence

from ..batch.scheduled import Extras
from ..errors import RequestError
from ..format.batch import BatchArray
from ..format.manifest import EmbeddingFacts, Manifest
from ..scheduler.request import RequestSpec
from ..tokenizer import Detokenizer, StopFinder, Tokenizer
from .beam_search import BeamSearch, BeamText
from .extras import check_extras
from .generation import Generation
from .params import SamplingParams
from .sampler import Constraint, Sampler
from .search import SearchRequest
from .tail import Tail


class Intake:
    """Checks prompts and parameters for an engine. Errors are RequestErrors. tail: the layers after its pooling.
    inputs: those that its program declares."""

    def __init__(
        self, manifest: Manifest, tokenizer: Tokenizer | None, tail: Tail = (), inputs: Sequence[BatchArray] = ()
    ) -> None:
        self._manifest, self._tokenizer, self.tail, self._inputs = manifest, tokenizer, tail, inputs

    def check_generates(self) -> None:
        """Raise RequestError if the engine was compiled for embeddings."""
        facts = self._manifest.embedding
        if facts is not None:
            made = "to score texts" if facts.scores else "for embeddings"
            raise RequestError(f"the engine was compiled {made} and has no logits", "compile the model without --task")

    def embedding(self) -> EmbeddingFacts:
        """The facts of an engine that embeds or scores; RequestError if it was compiled to generate."""
        if self._manifest.embedding is None:
            raise RequestError("the engine was compiled to generate text", "compile the model with --task embed")
        return self._manifest.embedding

    def check_scores(self, scores: bool) -> EmbeddingFacts:
        """As `embedding`; RequestError also if the engine scores texts and `scores` is False, or the other way
        round."""
        facts = self.embedding()
        if scores and not facts.scores:
            raise RequestError("the engine was compiled for embeddings", "compile the model with --task rerank")
        if facts.scores and not scores:
            raise RequestError("the engine was compiled to score texts", "compile the model with --task embed")
        return facts

    def prompt(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The prompt's token ids, a bos token for an empty prompt. RequestError if a token is not in the vocabulary, or
        if the prompt is too long."""
        model, limits = self._manifest.model, self._manifest.limits
        token_ids = tuple(map(int, prompt))
        if not token_ids:
            if model.bos_token_id is None:
                raise RequestError("the prompt is empty", "give at least one token", field="prompt")
            token_ids = (model.bos_token_id,)
        if len(token_ids) > limits.max_seq_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, the engine takes at most {limits.max_seq_len}",
                "shorten it, or compile with a larger --max-seq-len",
                field="prompt",
            )
        coded = self._manifest.embedding.coded_types if self._manifest.embedding is not None else 0
        known = model.vocab_size * max(coded, 1)
        if min(token_ids) < 0 or max(token_ids) >= known:
            wrong = next(token for token in token_ids if not 0 <= token < known)
            raise RequestError(f"token id {wrong} is not in the vocabulary of {model.vocab_size}", field="prompt")
        return token_ids

    def extras(self, extras: Extras) -> Extras:
        """A request's extras, checked: see `check_extras`."""
        if extras:
            check_extras(extras, self._inputs, self._manifest.limits.max_seq_len)
        return extras

    def params(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the engine's defaults filled in. RequestError for tokens outside the vocabulary, and for
        stop strings without a tokenizer."""
        params = params.resolve(self._manifest.sampling)
        vocab_size = self._manifest.model.vocab_size
        given = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words": [token for word in params.bad_words for token in word],
        }
        for name, tokens in given.items():
            for token in tokens:
                if token >= vocab_size:
                    raise RequestError(f"{name}: token id {token} is not in the vocabulary of {vocab_size}", field=name)
        if params.stop and self._tokenizer is None:
            raise RequestError(
                "stop: the engine has no tokenizer, so there is no text", "use stop_token_ids", field="stop"
            )
        return params

    def first_turn(self, prompt: Sequence[int]) -> int:
        """The length in tokens of a prompt's first turn, which ends at the first end token; 0 if there is none.

        Templates end turns of the system and of users with the same token as the model's turns.
        """
        ends = set(self._manifest.model.eos_token_ids)
        return next((at + 1 for at, token in enumerate(prompt) if at and token in ends), 0)

    def room(self, prompt: Sequence[int]) -> int:
        """How many tokens can follow a prompt."""
        return self._manifest.limits.max_seq_len - len(prompt)

    def generation(
        self, spec: RequestSpec, params: SamplingParams, index: int, constraint: Constraint | None
    ) -> Generation:
        """Make completion `index` of a checked prompt. constraint: None: any tokens are allowed."""
        prompt = spec.token_ids
        model, tokenizer = self._manifest.model, self._tokenizer
        end_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else model.eos_token_ids)
        return Generation(
            spec=spec,
            params=params,
            sampler=Sampler(params, prompt, model.vocab_size, end_ids, index, constraint),
            end_ids=end_ids,
            detokenizer=None if tokenizer is None else Detokenizer(tokenizer, prompt, params.skip_special_tokens),
            stop_finder=None if tokenizer is None else StopFinder(params.stop, params.include_stop),
            index=index,
        )

    def search(
        self, spec: RequestSpec, generations: Sequence[Generation], constraint: Constraint | None
    ) -> SearchRequest:
        """Make the beam search for the completions of a checked prompt. constraint: None: any tokens are allowed."""
        first = generations[0]
        params = first.params
        sampler = Sampler(params, spec.token_ids, self._manifest.model.vocab_size, first.end_ids, 0, constraint)
        words = None
        if params.stop and self._tokenizer is not None:
            words = BeamText(
                Detokenizer(self._tokenizer, spec.token_ids, params.skip_special_tokens), StopFinder(params.stop)
            )
        search = SearchRequest(
            spec=spec,
            search=BeamSearch(params, spec.max_new_tokens, first.end_ids, sampler, words),
            generations=generations,
        )
        for generation in generations:
            generation.search = search
        return search
