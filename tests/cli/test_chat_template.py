"""A text made by a template already has its special tokens, so none is added."""

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers.processors import TemplateProcessing

from mlx_speculation import SpeculativeGenerator
from mlx_speculation.cli.chat_template import encode
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

BEGIN, NAME = 0, "!"


@pytest.fixture(name="tokenizer")
def _tokenizer() -> TokenizerWrapper:
    """Make a tokenizer that adds a token at the front of every text."""
    tokenizer = byte_tokenizer(first=NAME)
    fast = tokenizer._tokenizer
    fast.add_special_tokens({"bos_token": NAME})
    fast.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{NAME} $A", special_tokens=[(NAME, BEGIN)]
    )
    return tokenizer


def test_the_first_token_is_there_once(tokenizer: TokenizerWrapper) -> None:
    assert encode(tokenizer, "ab", rendered=False)[0] == BEGIN
    assert encode(tokenizer, f"{NAME}ab", rendered=False).count(BEGIN) == 1
    assert encode(tokenizer, f"{NAME}ab", rendered=True).count(BEGIN) == 1
    assert BEGIN not in encode(tokenizer, "ab", rendered=True)


@pytest.mark.parametrize("text", ["ab", f"{NAME}ab"])
def test_raw_text_is_encoded_as_a_generator_does(
    tokenizer: TokenizerWrapper, text: str
) -> None:
    generator = SpeculativeGenerator(build("llama"), tokenizer)
    stream = generator.stream(text, max_tokens=0)
    for _ in stream:
        pass
    ids = encode(tokenizer, text, rendered=False)
    assert stream.stats.emitted == 0
    again = generator.stream(ids, max_tokens=0)
    for _ in again:
        pass
    assert stream.cached_tokens == again.cached_tokens == ids[:-1]
