"""One target on all ranks of mx.distributed; rank 0 prints.

    mlx.launch --backend ring -n 2 examples/several_ranks.py

Without mlx.launch there is one rank, which has the whole target.
"""

from mlx_speculation import RankLostError, SpeculativeGenerator, demo_models

# isort: split
import mlx.core as mx  # after mlx_speculation, which chooses a fast BLAS

group = mx.distributed.init()
models = demo_models()
generator = SpeculativeGenerator.from_pretrained(
    models["dense"], draft=models["draft"], group=group
)
try:
    stream = generator.stream("class Stack:\n", max_tokens=40)
    for chunk in stream:
        if group.rank() == 0:
            print(chunk.text, end="", flush=True)
except RankLostError as lost:
    raise SystemExit(f"\n{lost}") from lost
if group.rank() == 0:
    stats = stream.result.stats
    print(f"\n{stats.accepted} of {stats.drafted} drafted tokens were accepted")
    print(f"{group.size()} ranks")
