"""`python filled.py ENGINE SEQUENCES LENGTH [ANSWER]`: fills an engine and prints the bytes that it then takes.

ANSWER: how many of LENGTH tokens are generated (default 8); an engine that embeds generates none.
"""

import sys

import icc
from icc.runtime.commands.resident import resident_bytes

engine, sequences, length, answer = sys.argv[1], *map(int, [*sys.argv[2:], "8"][:3])
prompts = [[3 + (7 * row + column) % 100 for column in range(length - answer)] for row in range(sequences)]
for row, prompt in enumerate(prompts):
    prompt[0] = 3 + row  # no prompt is a prefix of another
with icc.load(engine) as llm:
    if llm.manifest.embedding is not None:
        llm.embed(prompts)
        print(resident_bytes())
        sys.exit()
    made = llm.generate(prompts, icc.SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True))
    assert all(len(completion.token_ids) == answer for completion in made)
    assert llm.loop.scheduler.num_preemptions == 0
    print(resident_bytes())
