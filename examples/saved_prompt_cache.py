"""Read a long prompt once, keep its caches in a file, and go on from there later.

The file holds the target's caches, and the tokens in them.
"""

import tempfile
from pathlib import Path

from mlx_speculation import SpeculativeGenerator, demo_models
from mlx_speculation.caches import load_caches, save_caches
from mlx_speculation.demo import demo_prompts

# isort: split
# After mlx_speculation, which chooses a fast BLAS on a Linux CPU:
from mlx_lm.models.cache import make_prompt_cache

bundled = demo_models()
generator = SpeculativeGenerator.from_pretrained(
    bundled["sliding"], draft=bundled["draft"]
)
document = demo_prompts()[0].text

caches = make_prompt_cache(generator.model)
read = generator.generate(document, max_tokens=0, prompt_cache=caches)

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "document.safetensors")
    save_caches(file, caches, read.cached_tokens)
    print(f"{len(read.cached_tokens)} tokens in {file.stat().st_size >> 10} KiB")
    loaded = load_caches(file)

result = generator.generate(
    "\n    def ",
    max_tokens=24,
    prompt_cache=loaded.caches,
    cached_tokens=loaded.tokens,
)
print(result.text)
