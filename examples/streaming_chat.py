"""A chat that streams its answers, and reads only the new part of each turn.

Each turn passes its caches, and the ids in them, to the next turn. The turns are
comments, since the bundled models know only Python. With your own model, encode each
turn with `tokenizer.apply_chat_template`.
"""

from mlx_speculation import Sampling, SpeculativeGenerator, demo_models

# isort: split
# After mlx_speculation, which chooses a fast BLAS on a Linux CPU:
from mlx_lm.models.cache import make_prompt_cache

TURNS = ("# Read a file, line by line.\n", "# Count the words in it.\n")

bundled = demo_models()
generator = SpeculativeGenerator.from_pretrained(
    bundled["hybrid"], draft=bundled["draft"]
)
caches = make_prompt_cache(generator.model)
held: list[int] = []

for number, turn in enumerate(TURNS):
    print(f"\n> {turn}", end="")
    stream = generator.stream(
        turn,
        max_tokens=32,
        sampling=Sampling(temperature=0.7, seed=number),
        stop="\n\n",
        prompt_cache=caches,
        cached_tokens=held,
    )
    with stream:  # Ctrl-C in here leaves caches that fit `cached_tokens`
        for chunk in stream:
            print(chunk.text, end="", flush=True)
    held = stream.result.cached_tokens

print(f"\n\nThe caches hold {len(held)} tokens of {len(TURNS)} turns.")
