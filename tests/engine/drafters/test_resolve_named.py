"""`draft_model` by name: a path, "mtp", "lookup", "auto"."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from mlx_speculation import (
    InvalidRequestError,
    LookupDraft,
    MtpDraft,
    SpeculativeGenerator,
    TokenizerMismatchError,
    demo_models,
    load,
    stream_generate,
)
from mlx_speculation.engine.drafters import resolve as resolve_module
from mlx_speculation.engine.drafters.draft import Draft, TargetInfo, members_of
from mlx_speculation.engine.drafters.resolve import resolve
from mlx_speculation.models import MtpConvention
from support.models.demo_folders import probed
from support.models.eagle_checkpoints import write_eagle
from support.models.mtp_checkpoints import write, write_tiny
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT = "def read(path):"


def text(model: Any, tokenizer: Any, **options: Any) -> tuple[list[int], Any]:
    responses = list(
        stream_generate(model, tokenizer, PROMPT, 16, num_draft_tokens=3, **options)
    )
    return [response.token for response in responses], responses[-1].stats


class Unfinished:
    def begin(self, sequence: Any) -> None: ...

    def propose(self, sequence: Any, limit: int, choose: Any) -> Any: ...


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (Unfinished(), "class Unfinished, which lacks settle, discard"),
        (LookupDraft, r"the class LookupDraft.*Pass LookupDraft\(\.\.\.\)"),
        (3, "draft is a int"),
    ],
)
def test_what_is_no_drafter_is_refused_with_a_reason(draft: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        resolve(draft, TargetInfo(build("llama"), byte_tokenizer(), None, 255))


def source(name: Any, model: Any, tokenizer: Any) -> Draft:
    draft = resolve(name, TargetInfo(model, tokenizer, None, 255)).draft
    assert draft is not None
    return draft


@pytest.fixture(name="tiny", scope="module")
def _tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    write_tiny(made / "target", layers=4)
    write_tiny(made / "draft")
    write_eagle(made / "eagle", "specforge")
    return made


def test_the_head_in_the_targets_folder_is_found_by_its_name(tmp_path: Path) -> None:
    written = write(tmp_path, "qwen3_5")
    convention = MtpConvention(norms="stored")
    model, tokenizer = load(probed(tmp_path, written.target, convention))
    plain, _ = text(model, tokenizer)
    for name in ("mtp", "auto"):
        drafted, stats = text(model, tokenizer, draft_model=name)
        assert drafted == plain
        assert stats.sources["mtp"].drafted > 0
        head, *lookups = members_of(source(name, model, tokenizer))
        assert isinstance(head, MtpDraft)
        assert [each.kind for each in lookups] == ["lookup"] * (name == "auto")


@pytest.mark.usefixtures("usual_layers")
def test_what_was_loaded_is_kept_until_another_name_is_asked_for(tiny: Path) -> None:
    model, tokenizer = load(tiny / "target")
    path = str(tiny / "draft")
    kept = source(path, model, tokenizer)
    assert source(Path(path), model, tokenizer) is kept
    assert source("lookup", model, tokenizer).kind == "lookup"
    assert source(path, model, tokenizer) is kept
    source(str(tiny / "eagle"), model, tokenizer)
    gone = weakref.ref(kept)
    del kept
    gc.collect()
    assert gone() is None
    assert resolve_module.ATTRIBUTE not in dict(model.parameters())


@pytest.mark.usefixtures("usual_layers")
def test_what_was_loaded_goes_with_its_target(tiny: Path) -> None:
    model, tokenizer = load(tiny / "target")
    gone = weakref.ref(source(tiny / "eagle", model, tokenizer))
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", ["mtp", "auto"])
def test_a_target_whose_folder_is_not_known_is_said(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="looked for in the target's folder"):
        source(name, build("llama"), byte_tokenizer())


def test_a_draft_with_other_token_ids_is_refused() -> None:
    with pytest.raises(TokenizerMismatchError):
        stream_generate(
            build("llama"), byte_tokenizer(), "x", draft_model=demo_models()["draft"]
        )


def test_a_named_lookup_takes_a_bound_of_its_history(tiny: Path) -> None:
    options: dict[str, Any] = {"history": 64}
    for name in ("auto", "lookup"):
        made = SpeculativeGenerator.from_pretrained(
            tiny / "target", draft=name, **options
        )
        lookup: Any = members_of(made.draft)[-1]
        assert lookup.places.history._half == 32
    with pytest.raises(InvalidRequestError, match=r"history is 64.*but draft is"):
        SpeculativeGenerator.from_pretrained(tiny / "target", draft="mtp", **options)
