"""Structured output: turns a JSON schema, a regular expression or a grammar into masks of the tokens that may come
next.

`sources` describes the wanted output as text that can be sent (`of_schema`, `of_regex`, `of_lark`). `compiling.lowered`
turns this into a grammar of llguidance, which may take a while, or refuses it with a reason. `constraints.Grammars`
compiles that for one tokenizer into constraints for a sampler. Needs the packages of `pip install
'icc-llm[structured]'`, which are imported only when a grammar is compiled.
"""
