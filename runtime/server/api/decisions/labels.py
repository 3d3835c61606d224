"""Labels: short answers that are one token each when they follow the given end of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from string import ascii_letters, ascii_uppercase, digits

from ....tokenizer import Tokenizer
from ..errors import conflict

_PAIRS = (("Yes", "No"), ("yes", "no"), ("True", "False"), ("true", "false"))


class Labels:
    """Finds labels that follow `tail`, the last characters of a prompt, and `end`, which is appended to the prompt.
    blank: the text with which their tokens begin."""

    def __init__(self, tokenizer: Tokenizer, tail: str, end: str = "", blank: str = "") -> None:
        self._tokenizer, self._tail, self._blank, self.end = tokenizer, tail + end, blank, end
        self._before = tokenizer.encode(self._tail, add_special_tokens=False)
        self._letters: dict[str, int] = {}
        self._left = _candidates()

    @property
    def works(self) -> bool:
        """Whether at least two labels are single tokens."""
        return self._token("A") is not None and self._token("B") is not None

    def letters(self, count: int) -> dict[str, int]:
        """`count` labels without a meaning, with their token ids. HttpError 400 if the vocabulary has fewer."""
        for text in self._left if count > len(self._letters) else ():
            token = self._token(text)
            if token is not None and token not in self._letters.values():
                self._letters[text] = token
                if len(self._letters) == count:
                    break
        if len(self._letters) < count:
            most = len(self._letters)
            raise conflict(f"questions: the tokenizer has {most} labels of one token, not {count}", "questions")
        return dict(list(self._letters.items())[:count])

    def yes_and_no(self) -> dict[str, int]:
        """Two labels for true and false, with their token ids; two letters if no such pair of words is one token
        each."""
        for pair in _PAIRS:
            tokens = [self._token(text) for text in pair]
            if None not in tokens and len(set(tokens)) == 2:
                return {text: token for text, token in zip(pair, tokens, strict=True) if token is not None}
        return self.letters(2)

    def _token(self, text: str) -> int | None:
        """The token id of a text that follows the tail; None if the text is several tokens, or changes the tokens
        before it."""
        ids = self._tokenizer.encode(self._tail + self._blank + text, add_special_tokens=False)
        return ids[-1] if ids[:-1] == self._before else None


@lru_cache(maxsize=16)
def labels_behind(tokenizer: Tokenizer, tail: str, after_word: bool) -> Labels:
    """The labels that follow a tail, cached. after_word: whether a blank comes before them, which may begin the token
    or end the prompt (see `Labels.end`)."""
    ways = (("", " "), (" ", ""), ("", "")) if after_word else (("", ""), ("", " "), (" ", ""))
    found = [Labels(tokenizer, tail, end, blank) for end, blank in ways]
    return next((one for one in found if one.works), found[0])


def _candidates() -> Iterator[str]:
    yield from ascii_letters[26:] + ascii_letters[:26] + digits
    yield from map("".join, product(ascii_uppercase, repeat=2))
