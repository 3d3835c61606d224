"""Structured output: from a JSON schema, a regular expression or a grammar to the tokens that may come next.

`sources` says what is wanted, as text that can be sent (`of_schema`, `of_regex`, `of_lark`); `compiling.lowered` turns
it into a grammar of llguidance, which may take a while and refuses in words; `constraints.Grammars` makes of that, for
one tokenizer, what a sampler asks. Needs the packages of `pip install 'icc-llm[structured]'`, which nothing imports
before a grammar is compiled.
"""
