"""`stream_generate` and `generate` with mlx-lm's keywords and responses.

    from mlx_lm import load
    from mlx_speculation import stream_generate        # instead of mlx_lm's

    for response in stream_generate(model, tokenizer, prompt, draft_model=small):
        print(response.text, end="")

The text is that of mlx-lm without a draft: greedy if there is no sampler, else drawn
from the sampler's distribution. Options, too, work as in mlx-lm without a draft:
`prefill_step_size` is 2048 by default, `max_kv_size` and `prompt_progress_callback`
have an effect, and caches hold the last token.

The call checks all arguments; the model runs when the first response is read. An
unknown keyword raises `TypeError`, and values that do not fit together raise
`InvalidRequestError`. A cache of an unknown kind raises `UnsupportedCacheError`.
"""

from collections.abc import Callable, Generator
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.engine.argument_checks import checked_count
from mlx_speculation.engine.drafters.resolve import DraftArgument
from mlx_speculation.engine.generator import SpeculativeGenerator
from mlx_speculation.engine.mlx_lm_compat.prompt_cache import (
    Caches,
    quantization_of,
)
from mlx_speculation.engine.mlx_lm_compat.response import (
    Progress,
    SpeculativeResponse,
    responses,
)
from mlx_speculation.engine.mlx_lm_compat.sampler import checked_sampling
from mlx_speculation.engine.options import StreamKeywords
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import PREFILL_STEP, logit_width, wrapped
from mlx_speculation.samplers import LogitsProcessor, Sampler

ENDLESS = 1 << 62
Responses = Generator[SpeculativeResponse, None, None]


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | SequenceOf[int],
    max_tokens: int = 256,
    draft_model: DraftArgument | None = None,
    stream: mx.Stream | mx.ThreadLocalStream | None = None,
    *,
    sampler: Sampler | None = None,
    logits_processors: SequenceOf[LogitsProcessor] | None = None,
    num_draft_tokens: int | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = PREFILL_STEP,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prompt_progress_callback: Callable[[int, int], Any] | None = None,
    input_embeddings: mx.array | None = None,
    seed: int | None = None,
    exact: bool | int = False,
    **unknown: Any,
) -> Responses:
    """Generate as `mlx_lm.stream_generate` does, faster if a draft helps.

    Args:
        model: the target, loaded by mlx-lm.
        tokenizer: its tokenizer.
        prompt: text or token ids, appended to the tokens in `prompt_cache`.
        max_tokens: at least 1; -1: no limit.
        draft_model: see `draft` of `GeneratorOptions`.
        stream: the stream that mlx works on; None: the default one.
        sampler: chooses tokens; None: greedy decoding.
        logits_processors: called as in plain decoding, see `Sampling`.
        num_draft_tokens: tokens to draft in a round; None: an adaptive number.
        max_kv_size: positions to keep; ignored if the model makes its own caches.
        prompt_cache: the target's caches, then perhaps the draft's; written to.
        prefill_step_size: the largest number of prompt tokens of a forward.
        kv_bits: bits of the target's quantized caches; None: not quantized.
        kv_group_size: how many numbers share a scale.
        quantized_kv_start: the position from which on caches are quantized.
        prompt_progress_callback: called with how many prompt tokens are read, and how
            many there are.
        input_embeddings: refused, since drafts are proposed for token ids.
        seed: for a sampler of `make_sampler`; None: drawn from mlx's generator.
        exact: see `GeneratorOptions`; refuses custom samplers and `max_kv_size`.
        unknown: refused.
    """
    _check_keywords(unknown, input_embeddings)
    length = 0 if draft_model is None else num_draft_tokens
    sampling = checked_sampling(sampler, logits_processors, seed, drafted=length != 0)
    generator = SpeculativeGenerator(
        model, wrapped(tokenizer), draft=draft_model, draft_length=length, exact=exact
    )
    step = checked_count("prefill_step_size", prefill_step_size, 1)
    kv = quantization_of(kv_bits, kv_group_size, quantized_kv_start)
    options: StreamKeywords = {"sampling": sampling, "kv_quantization": kv}
    options |= {"prefill_step_size": step, "max_tokens": _checked_budget(max_tokens)}
    passed = (prompt_cache, max_kv_size, prompt_progress_callback, stream)
    return _responses(generator, prompt, options, *passed)


def _responses(
    generator: SpeculativeGenerator,
    prompt: Any,
    options: StreamKeywords,
    prompt_cache: list[Any] | None,
    max_kv_size: int | None,
    callback: Callable[[int, int], Any] | None,
    device: mx.Stream | mx.ThreadLocalStream | None,
) -> Responses:
    model, tokens = generator.model, generator.encode(prompt)
    caches = Caches.of(model, generator.draft_models, prompt_cache, max_kv_size)
    progress = Progress(callback, len(tokens))
    options |= {
        "prompt_cache": caches.target,
        "draft_cache": caches.draft,
        "logprobs": 0,
        "logprob_rows": True,
        "prompt_progress": progress.advance,
        "yielded_only": True,
        "level_draft": caches.draft is not None and prompt_cache is not None,
    }
    return responses(
        generator.stream(tokens, **options),
        generator.tokenizer,
        generator.tokenizer.detokenizer,
        progress,
        logit_width(model),
        device=device,
        each=caches.write_back,
    )


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | SequenceOf[int],
    verbose: bool = False,
    **options: Any,
) -> str:
    """Return the whole text; takes what `stream_generate` takes.

    With `verbose`, print the text as it is generated, then speeds and acceptance.
    """
    say = partial(print, end="", flush=True) if verbose else _keep_silent
    say("=" * 10 + "\n")
    parts, response = [], None
    for response in stream_generate(model, tokenizer, prompt, **options):
        say(response.text)
        parts.append(response.text)
    say("\n" + "=" * 10 + "\n")
    if response is not None:  # None: the context has no room for a token
        say(_summary(response) + "\n")
    return "".join(parts)


def _keep_silent(line: str) -> None:
    """Print nothing, not even flush standard output."""


def _summary(last: SpeculativeResponse) -> str:
    lines = [
        f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec",
        f"Generation: {last.generation_tokens} tokens, "
        f"{last.generation_tps:.3f} tokens-per-sec",
        f"Peak memory: {last.peak_memory:.3f} GB",
    ]
    stats = last.stats
    if stats is not None and stats.drafts:
        lines.append(
            f"Drafts: {stats.accepted} of {stats.drafted} tokens accepted "
            f"({stats.acceptance_rate:.0%}), mean accepted length "
            f"{stats.mean_accepted_length:.2f}"
        )
    return "\n".join(lines)


def _check_keywords(unknown: dict[str, Any], embeddings: Any) -> None:
    if unknown:
        raise TypeError(
            f"stream_generate() takes no keyword {', '.join(map(repr, unknown))}. It "
            "takes those of mlx_lm.stream_generate, seed and exact; for more options "
            "use mlx_speculation.SpeculativeGenerator."
        )
    if embeddings is not None:
        raise InvalidRequestError(
            f"input_embeddings of shape {list(embeddings.shape)} were passed, and only "
            "token ids can be drafted and checked. Use mlx_lm.stream_generate for them."
        )


def _checked_budget(max_tokens: Any) -> int:
    if max_tokens == -1:
        return ENDLESS
    return checked_count("max_tokens", max_tokens, 1, ", or -1 for no limit")
