"""Many clients at once, some of which leave: each text depends on its seed alone."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
import openai
import pytest

from mlx_speculation import (
    PrefixCache,
    Sampling,
    SpeculativeGenerator,
    demo_models,
    load,
)
from mlx_speculation.samplers import Chooser
from mlx_speculation.server import Server
from support.identity import assert_same_up_to_ties
from support.processes.servers import (
    LETTERS,
    NAME,
    bytes_in_use,
    client_of,
    make_tiny,
    post,
    serving,
    tiny_pair,
    wrapped_letters,
)

CLIENTS = 8
SPECULATIVE: tuple[dict[str, Any], ...] = (
    {},
    {"off": True},
    {"max_draft": 2},
    {"draft": "lookup", "max_draft": 3},
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a client.

    Attributes:
        prompt: the text of the prompt.
        tokens: max_tokens of the request.
        sampling: options with which tokens are sampled.
        speculative: the field of the request that chooses the draft.
        stream: whether the answer is streamed.
        leave: number of pieces after which the client leaves; None: it stays.
    """

    prompt: str
    tokens: int
    sampling: Sampling
    speculative: dict[str, Any]
    stream: bool
    leave: int | None

    @property
    def body(self) -> dict[str, Any]:
        """The body of the request, which also asks for token ids."""
        chosen = self.sampling
        return {
            "model": NAME,
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "temperature": chosen.temperature,
            "top_p": chosen.top_p,
            "seed": chosen.seed,
            "stream": self.stream,
            "logprobs": 0,
            "extra_body": {"speculative": self.speculative},
        }


def asks(count: int, prompts: list[str], tokens: int, seed: int) -> list[Ask]:
    """Draw requests: a quarter of the clients leave early, and prompts repeat."""
    draw = random.Random(seed)
    return [
        Ask(
            prompt=draw.choice(prompts)[: draw.randint(4, 80)],
            tokens=draw.randint(1, tokens),
            sampling=draw.choice(
                [
                    Sampling(seed=number),
                    Sampling(temperature=0.8, seed=number),
                    Sampling(temperature=1.0, top_p=0.9, seed=number),
                ]
            ),
            speculative=draw.choice(SPECULATIVE),
            stream=(leave := draw.random() < 0.25) or draw.random() < 0.5,
            leave=draw.randint(0, 3) if leave else None,
        )
        for number in range(count)
    ]


def answers(server: Server, wanted: list[Ask]) -> list[tuple[str, list[int]] | None]:
    """Send requests from parallel clients; return texts and ids, None if one left."""
    texts: dict[int, tuple[str, list[int]] | None] = {}
    failed: list[BaseException] = []

    def run(which: int) -> None:
        try:
            with client_of(server) as client:
                for number in range(which, len(wanted), CLIENTS):
                    texts[number] = answer(client, wanted[number])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    return [texts[number] for number in range(len(wanted))]


def answer(client: openai.OpenAI, ask: Ask) -> tuple[str, list[int]] | None:
    """Send one request; return None if the client left before the end."""
    if not ask.stream:
        whole = client.completions.create(**ask.body).choices[0]
        logprobs: Any = whole.logprobs
        return whole.text, logprobs.token_ids
    text = ""
    ids: list[int] = []
    with client.completions.create(**ask.body) as pieces:
        for number, piece in enumerate(pieces):
            if number == ask.leave:
                return None
            text += piece.choices[0].text
            logprobs = piece.choices[0].logprobs
            ids += [] if logprobs is None else logprobs.token_ids
    return text, ids


def check(
    model: nn.Module, tokenizer: Any, wanted: list[Ask], texts: list[Any], ids: int
) -> int:
    """Assert that every text is plain decoding's; return the number of near-ties."""
    plain = SpeculativeGenerator(model, tokenizer)
    ties = 0
    for ask, got in zip(wanted, texts, strict=True):
        if got is None:
            continue
        known = plain.generate(ask.prompt, max_tokens=ask.tokens, sampling=ask.sampling)
        if got[1] == known.tokens:
            assert got[0] == known.text
            continue
        ties += 1
        tie = assert_same_up_to_ties(
            model,
            Chooser(ask.sampling, ids),
            plain.encode(ask.prompt),
            known.tokens,
            got[1],
            width=5,
        )
        print(f"near-tie: {tie}")  # noqa: T201  the count of near-ties is a result
    return ties


def load_and_check(
    make: Callable[..., Any],
    model: nn.Module,
    tokenizer: Any,
    wanted: list[Ask],
    ids: int,
) -> None:
    """Serve requests, check their texts, and check that their memory is released."""
    prefixes = PrefixCache(1 << 28, every=16)
    limits = {"max_tokens": 500, "prompt_tokens": 1000, "seconds": 300.0}
    with serving(make, prefixes=prefixes, limits=limits, max_rows=6) as server:
        warm = {"model": NAME, "prompt": "ABC", "max_tokens": 9, "temperature": 1}
        for speculative in SPECULATIVE:
            assert post(server, {**warm, "speculative": speculative}).status == 200
        bytes_before = bytes_in_use(server, prefixes)
        texts = answers(server, wanted)
        assert bytes_in_use(server, prefixes) <= bytes_before + (1 << 16)
    left = sum(got is None for got in texts)
    ties = check(model, tokenizer, wanted, texts, ids)
    print(f"{len(texts)} requests, {left} left early, {ties} near-ties")  # noqa: T201
    assert left > 0
    assert ties <= len(texts) // 20


@pytest.mark.parametrize(
    "name", ["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)]
)
def test_texts_of_many_clients_are_those_of_their_seeds(name: str) -> None:
    model, _ = tiny_pair(name)
    prompts = ["ABCDEFGHIJKLMNOPQRSTUVWXYZ" * 4, "ABCDEFGHZYXWVUT" * 8, "SPEECH" * 30]
    wanted = asks(12, prompts, 16, seed=12)
    load_and_check(make_tiny(name), model, wrapped_letters(), wanted, LETTERS)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["dense", "sliding", "hybrid"])
def test_two_hundred_requests_of_the_bundled_models(target: str) -> None:
    folders = demo_models()

    def make(prefixes: PrefixCache | None) -> SpeculativeGenerator:
        return SpeculativeGenerator.from_pretrained(
            folders[target],
            draft=folders["draft"],
            draft_length=4,
            prefix_cache=prefixes,
        )

    model, tokenizer = load(folders[target])
    prompts = ["def add(first, second):\n    return" * 9, "Once upon a time " * 12]
    wanted = asks(200, prompts, 40, seed=4)
    load_and_check(make, model, tokenizer, wanted, len(tokenizer.get_vocab()))
