"""mlx-lm's `stream_generate`, with a draft: the same keywords, the same responses.

Change the import, and pass `draft_model`: a model, a path, "mtp", "lookup" or "auto".
"""

from mlx_speculation import demo_models, load, make_sampler, stream_generate

# isort: split
import mlx.core as mx  # after mlx_speculation, which chooses a fast BLAS

bundled = demo_models()
model, tokenizer = load(bundled["dense"])
prompt = "class Queue:\n    def __init__(self"
sampler = make_sampler(temp=0.7, top_p=0.95)
texts = []

for draft_model in (None, bundled["draft"], "lookup"):
    mx.random.seed(7)  # decides the text, as in mlx-lm, whatever the draft
    text = ""
    for response in stream_generate(
        model,
        tokenizer,
        prompt,
        max_tokens=24,
        draft_model=draft_model,
        sampler=sampler,
    ):
        text += response.text
    texts.append(text)
    assert response.stats is not None
    print(
        f"draft_model={getattr(draft_model, 'name', draft_model)}: "
        f"{response.generation_tps:.0f} tokens/s, "
        f"{response.stats.acceptance_rate:.0%} accepted"
    )

assert len(set(texts)) == 1
print(prompt + texts[0])
