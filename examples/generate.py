"""Text as it is generated, from a fleet that serves a language model.

Start one with `mgpuctl up --model chat=/srv/models/SmolLM2-135M-Instruct`, and run
`python examples/generate.py "What is a lease?"`.
"""

import sys

import multigpu

question = " ".join(sys.argv[1:]) or "What is the capital of France?"
messages = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": question},
]
with multigpu.Client() as client:
    with client.generate(messages, stream=True, max_tokens=100) as generation:
        for piece in generation:
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write(f"\n[{len(generation.result.token_ids)} tokens by {generation.result.worker_id}]\n")
