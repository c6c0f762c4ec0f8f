"""Generation from a list of prompts in one batch, with options for each prompt."""

from collections.abc import Sequence
from dataclasses import replace

from mlx_speculation.engine.batch.generator import BatchGenerator
from mlx_speculation.engine.batch.request import StreamSource
from mlx_speculation.engine.options import StreamKeywords
from mlx_speculation.engine.prompt import Prompt
from mlx_speculation.engine.result import Result
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.samplers import Sampling, derived_seed


def generate_batch(
    generator: StreamSource,
    prompts: Sequence[Prompt],
    max_rows: int,
    options: StreamKeywords,
    each: Sequence[StreamKeywords],
) -> list[Result]:
    """Generate all texts; see `SpeculativeGenerator.generate_batch`."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts is a {type(prompts).__name__}, and a list of prompts is needed. "
            "Put the one prompt into a list."
        )
    rows = options_of_rows(len(prompts), options, each)
    with BatchGenerator(generator, max_rows=max_rows) as batch:
        uids = [
            batch.insert(prompt, **row)
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        while batch.waiting or batch.running:
            batch.next()
        errors = [batch.error(uid) for uid in uids]
        results = [batch.remove(uid) for uid in uids]
    failed = [index for index, error in enumerate(errors) if error is not None]
    if failed:
        error = errors[failed[0]]
        assert error is not None
        error.add_note(
            f"This error ended row {failed[0]}. {len(failed)} of {len(prompts)} rows "
            "failed. To get the results of the other rows, use BatchGenerator."
        )
        raise error
    return results


def options_of_rows(
    count: int, options: StreamKeywords, each: Sequence[StreamKeywords]
) -> list[StreamKeywords]:
    """Return the options of each row; refuse a wrong number of entries in `each`."""
    if each and len(each) != count:
        raise InvalidRequestError(
            f"each= has {len(each)} entries, but there are {count} prompts. Pass one "
            "entry for each prompt, and options for all prompts outside of each=."
        )
    rows: list[StreamKeywords] = [{**options} for _ in range(count)]
    shared = options.get("sampling")
    if isinstance(shared, Sampling) and shared.seed is not None:
        for index, row in enumerate(rows):
            row["sampling"] = replace(shared, seed=derived_seed(shared.seed, index))
    if not each:
        return rows
    return [{**row, **more} for row, more in zip(rows, each, strict=True)]
