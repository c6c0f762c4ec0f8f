"""The simplest use: a target, a draft, and the text that the target alone would write.

Your own two models may be folders or repositories, and have to share their tokenizer.
"""

from mlx_speculation import SpeculativeGenerator, demo_models

bundled = demo_models()
generator = SpeculativeGenerator.from_pretrained(
    bundled["dense"], draft=bundled["draft"]
)

stream = generator.stream("def fibonacci(n):", max_tokens=48)
for chunk in stream:
    print(chunk.text, end="", flush=True)

stats = stream.result.stats
print(f"\n\n{stats.accepted} of {stats.drafted} drafted tokens were accepted")
print(f"{stats.tokens_per_second:.0f} tokens per second")
