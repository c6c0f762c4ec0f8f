"""Several requests at once, each with its own options; they come and go between rounds.

Each text equals the one that its prompt gets without a batch. If all prompts are known
at the start, `generate_batch` is simpler.
"""

from mlx_speculation import (
    BatchGenerator,
    Sampling,
    SpeculativeGenerator,
    demo_models,
)

PROMPTS = ["def fib(n):\n", "class Queue:\n", "import os\n", "# Sort a list.\n"]

bundled = demo_models()
generator = SpeculativeGenerator.from_pretrained(
    bundled["dense"], draft=bundled["draft"], draft_length=4
)
texts: dict[int, str] = {}
left = list(enumerate(PROMPTS))

with BatchGenerator(generator, max_rows=3) as batch:
    while left or batch.waiting or batch.running:
        if left:  # one request is added in each round; the fourth waits
            seed, prompt = left.pop()
            sampling = Sampling(temperature=0.3, seed=seed)
            uid = batch.insert(prompt, max_tokens=16 + 8 * seed, sampling=sampling)
            texts[uid] = prompt
        for response in batch.next():
            if response.chunk is not None:
                texts[response.uid] += response.chunk.text
            if response.finish_reason is not None:
                batch.remove(response.uid)
    print("\n---\n".join(texts.values()))
    stats = batch.stats
    print(f"{stats.emitted} tokens in {stats.forwards} forwards")
