"""`python filled.py ENGINE SEQUENCES LENGTH`: fills an engine with sequences and prints the bytes it takes then."""

import sys

import icc
from icc.runtime.commands.resident import resident_bytes

engine, sequences, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
prompts = [[3 + (7 * row + column) % 100 for column in range(length - 8)] for row in range(sequences)]
for row, prompt in enumerate(prompts):
    prompt[0] = 3 + row  # so that none is a prefix of another
with icc.load(engine) as llm:
    made = llm.generate(prompts, icc.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert all(len(completion.token_ids) == 8 for completion in made)
    assert llm.loop.scheduler.num_preemptions == 0
    print(resident_bytes())
