"""Compares drafts with plain decoding on this machine; put in your pair and prompts.

Plain and drafted generation take turns, so that a busy machine slows both.
`mlx-speculation benchmark` and scripts/spec_bench.py measure mlx-lm's own loop too.
"""

from statistics import median

from mlx_speculation import Sampling, SpeculativeGenerator, demo_models
from mlx_speculation.demo import demo_prompts

TOKENS, REPEATS = 16, 2  # more of both for figures that you want to keep
LENGTHS = (0, 3)  # drafted tokens in a round; 0 is plain decoding
PROMPTS = [prompt.text[-120:] for prompt in demo_prompts()[:2]]

bundled = demo_models()
generator = SpeculativeGenerator.from_pretrained(
    bundled["dense"], draft=bundled["draft"]
)
seconds: dict[int, list[float]] = {length: [] for length in LENGTHS}
texts: dict[tuple[int, str], str] = {}
generator.generate(PROMPTS[0], max_tokens=8)  # compiles kernels

for _ in range(REPEATS):
    for prompt in PROMPTS:
        for length in LENGTHS:
            sampling = Sampling(temperature=0.7, seed=1)
            result = generator.generate(
                prompt, draft_length=length, max_tokens=TOKENS, sampling=sampling
            )
            seconds[length].append(result.stats.decode_seconds / TOKENS)
            texts[length, prompt] = result.text

assert all(texts[length, p] == texts[0, p] for length in LENGTHS for p in PROMPTS)
for length, times in seconds.items():
    gain = median(seconds[0]) / median(times)
    print(f"{length} drafted: {1 / median(times):4.0f} tokens/s, {gain:.2f} x plain")
