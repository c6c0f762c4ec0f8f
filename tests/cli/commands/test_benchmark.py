"""`benchmark`: ways to decode, their texts, the plot, refused options."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mlx_speculation import SpeculativeGenerator, demo_models
from mlx_speculation.cli import measure
from mlx_speculation.cli.commands import benchmark
from mlx_speculation.cli.console import Screen
from mlx_speculation.engine.equivalence import texts
from mlx_speculation.engine.equivalence.texts import Parting
from support.models.demo_folders import copy_of
from support.processes.commands import Commands

DRAFT = str(demo_models()["draft"])
PAIR = ["benchmark", DRAFT, "--draft", DRAFT, "--draft-length", "2"]
SHORT = [*PAIR, "-p", "def add(", "-p", "class A", "-m", "6", "--passes", "2"]


def test_all_arms_are_measured_and_their_texts_compared(
    commands: Commands, tmp_path: Path
) -> None:
    plot = tmp_path / "out.png"
    options = ["--compare-length", "3", "--compare-length", "1", "--plot", str(plot)]
    report = commands.object(*SHORT, *options)
    arms = {arm["name"]: arm for arm in report["arms"]}
    assert list(arms) == [
        "no draft",
        "mlx-lm, no draft",
        "draft, 2 tokens",
        "draft, 1 token",
        "draft, 3 tokens",
    ]
    assert report["plain"] in ("no draft", "mlx-lm, no draft")
    assert (report["same"], report["passes"], report["tokens"]) == (True, 2, 6)
    assert report["texts"] == 2
    for arm in arms.values():
        assert len(arm["tokens_per_second"]) == 2
        spread = arm["speed"]
        assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        assert arm["partings"] == []
        pairs = zip(
            arm["tokens_per_second"],
            arms[report["plain"]]["tokens_per_second"],
            strict=True,
        )
        ratios = [speed / plain for speed, plain in pairs]
        assert arm["over_plain"]["high"] == pytest.approx(max(ratios))
        assert arm["over_plain"]["low"] == pytest.approx(min(ratios))
    assert arms[report["plain"]]["over_plain"]["median"] == 1
    assert arms["mlx-lm, no draft"]["statistics"] is None
    counted = arms["draft, 3 tokens"]["statistics"]
    assert counted["emitted"] == 12
    assert counted["accepted"] == counted["drafted"] > 0  # the target is its own draft
    assert len(counted["accepted_per_position"]) == 3
    assert not [name for name in counted if "second" in name]
    assert plot.read_bytes().startswith(b"\x89PNG")

    done = commands(*SHORT)
    assert done.exit_code == 0
    shown = " ".join(done.stdout.split())
    assert re.search('each pass divides the speed by that of "(mlx-lm, )?no', shown)
    verdict = "All texts are those of plain decoding.\n"
    advice = done.stdout.partition(verdict)[2]
    busy = "Plain decoding ran at "
    best = "Best here: --draft /"
    assert advice.startswith((best, "No draft ", busy))
    assert report["advice"].startswith(("Best here", "No draft ", busy))


def test_two_names_of_the_same_lookup_are_measured_once(commands: Commands) -> None:
    """The target's folder offers no draft, so "auto" is a lookup."""
    words = ["benchmark", DRAFT, "--draft", "auto", "--draft", "lookup", "-m", "6"]
    done = commands(*words, "--draft-length", "2", "-p", "A list", "--passes", "1")
    assert done.exit_code == 0
    assert "lookup is not measured: it is the same draft as auto" in done.stderr
    assert "auto: lookup, 2 tokens" in done.stdout
    assert "lookup, 2 tokens" not in done.stdout.replace("auto: lookup", "")


@pytest.mark.parametrize(
    ("ours", "theirs", "advice"),
    [
        ([10, 13], [10, 13], "Best here: --draft a --draft-length 4\nx plain is 2.00"),
        ([10, 14.1], [10, 10], "Plain decoding ran at 10.0 to 14.1 tokens/s, so"),
        ([10, 10], [10, 14.1], "Plain decoding ran at 10.0 to 14.1 tokens/s, so"),
    ],
)
def test_nothing_is_recommended_if_plain_decoding_was_not_steady(
    ours: list[float], theirs: list[float], advice: str
) -> None:
    """Each of the two ways without a draft has to be steady."""
    arms = [measure.Arm("", 0, speeds=speeds) for speeds in (ours, theirs)]
    arms.append(measure.Arm("a, 4 tokens", 4, speeds=[2 * each for each in ours]))
    assert benchmark._advice(arms, arms[0], ["a"]).startswith(advice)


BEST = "Best here: --draft a --draft-length 4\nx plain is "
LOSES = "No draft pays here: for the best (a, 4 tokens) x plain is "


@pytest.mark.parametrize(
    ("ratios", "advice"),
    [
        ((0.5, 0.5, 2, 2, 2), f"{LOSES}2.00 (0.50 to 2.00), its harmonic mean 0.91"),
        ((0.5, 3.5), f"{LOSES}2.00 (0.50 to 3.50), its harmonic mean 0.88"),
        ((0.37, 1.06, 1.09), f"{LOSES}1.06 ("),
        ((0.9, 1.4, 3.0), f"{BEST}1.40 (0.90 to 3.00), its harmonic mean 1.39."),
        ((1.6,) * 79 + (0.6,), f"{BEST}1.60 ("),
        ((1.3,) * 15 + (0.75,), f"{BEST}1.30 ("),
        ((1.9,) * 4 + (0.5,), f"{BEST}1.90 (0.50 to 1.90), its harmonic mean 1.22."),
        ((0.98, 1.01, 1.02), f"{LOSES}1.01 ("),
        ((0.99, 1, 1, 5, 5), f"{LOSES}1.00 ("),
    ],
)
def test_a_draft_is_recommended_if_the_median_and_all_passes_together_gain(
    ratios: tuple[float, ...], advice: str
) -> None:
    arms = [measure.Arm("", 0, speeds=[10.0] * len(ratios)) for _ in range(2)]
    arms.append(measure.Arm("a, 4 tokens", 4, speeds=[10 * each for each in ratios]))
    assert benchmark._advice(arms, arms[0], ["a"]).startswith(advice)


@pytest.mark.parametrize("passes", [5, 7, 15, 40, 80])
def test_a_machine_is_not_called_busy_more_often_after_more_passes(passes: int) -> None:
    """Speeds with a standard deviation of 8 % are usual."""
    random = Random(0)
    runs = [[random.gauss(10, 0.8) for _ in range(passes)] for _ in range(200)]
    assert sum(measure.busy(run) is not None for run in runs) <= 12
    slow = [speed * (0.5 if i % 4 == 1 else 1) for i, speed in enumerate(runs[0])]
    assert measure.busy(slow) is not None


@pytest.mark.parametrize("unsteady", [[3, 13, 13, 13, 13], [7, 7, 20, 20, 20]])
def test_a_steady_draft_is_recommended_before_one_that_may_lose_more(
    unsteady: list[float],
) -> None:
    arms = [measure.Arm("", 0, speeds=[10.0] * 5) for _ in range(2)]
    arms.append(measure.Arm("a", None, speeds=unsteady))
    arms.append(measure.Arm("b", None, draft=1, speeds=[11.0, 12.0, 12.0, 12.0, 12.0]))
    folder = "secret lab/x y/my draft"
    command, shown = benchmark._advice(arms, arms[0], ["a", folder]).splitlines()
    assert command == f"Best here: --draft '{folder}'"
    assert shown == "x plain is 1.20 (1.10 to 1.20), its harmonic mean 1.18."


@pytest.mark.parametrize(
    ("adaptive", "fixed", "length"),
    [
        (1.20, 1.25, ""),
        (1.20, 1.27, " --draft-length 4"),
        (1.00, 1.04, " --draft-length 4"),  # the adaptive length gains nothing
        (1.20, 1.10, ""),
    ],
)
def test_a_fixed_length_is_recommended_if_it_is_clearly_faster(
    adaptive: float, fixed: float, length: str
) -> None:
    arms = [measure.Arm("", 0, speeds=[10.0] * 5) for _ in range(2)]
    arms.append(measure.Arm("a, adaptive", None, speeds=[10 * adaptive] * 5))
    arms.append(measure.Arm("a, 4 tokens", 4, speeds=[10 * fixed] * 5))
    command, _ = benchmark._advice(arms, arms[0], ["a"]).splitlines()
    assert command == f"Best here: --draft a{length}"
    arms[2].draft, names = 1, ["a", "b"]  # the adaptive length is of another draft
    command, _ = benchmark._advice(arms, arms[0], names).splitlines()
    best = "b" if adaptive > fixed else "a --draft-length 4"
    assert command == f"Best here: --draft {best}"


def test_plain_is_the_one_that_is_faster_by_turns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The column "x plain" of the two ways without a draft is at most 1."""
    arms = measure.arms_of(["a"], [4])
    arms[0].speeds, arms[1].speeds = [7.6, 7.6, 9.0], [7.3, 8.5, 8.6]
    arms[2].speeds = [8.0, 8.0, 8.0]
    benchmark._report(Screen(json=True), arms, ["a"], "")
    said = json.loads(capsys.readouterr().out)
    assert said["plain"] == "no draft"  # the median speed of the other is higher
    assert [arm["over_plain"]["median"] <= 1 for arm in said["arms"][:2]] == [True] * 2


@pytest.mark.parametrize("draft", ["lookup", "auto"])
def test_a_lookup_does_not_know_the_answers_of_other_runs(
    commands: Commands, draft: str
) -> None:
    generator = SpeculativeGenerator.from_pretrained(DRAFT, draft="lookup", history=0)
    text = "A list of"
    first = generator.generate(
        text, max_tokens=24, draft_length=4, stop_tokens=()
    ).stats
    words = ["benchmark", DRAFT, "--draft", draft, "--draft-length", "4", "-m", "24"]
    report = commands.object(*words, "-p", text, "--passes", "3")
    counted = report["arms"][2]["statistics"]
    assert counted["drafted"] == 3 * first.drafted
    assert counted["accepted"] == 3 * first.accepted


def test_lengths_by_measurement_are_calibrated_first(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path))
    options = ["-p", "def f", "-m", "4", "--passes", "1"]
    report = commands.object("benchmark", DRAFT, "--draft", "lookup", *options)
    lengths = [arm["draft_length"] for arm in report["arms"]]
    assert lengths == [0, 0, None, 1, 2, 4, 8]
    assert len(list((tmp_path / "costs").glob("*.json"))) == 1


def test_several_drafts_run_on_the_messages_of_a_file(
    commands: Commands, tmp_path: Path
) -> None:
    folder = copy_of("draft", tmp_path / "chat")
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    file = tmp_path / "questions.jsonl"
    lines = [
        '{"turns": ["def f(x):", "next"]}',
        "",
        '{"prompt": "class A"}',
        '"import"',
    ]
    file.write_text("\n".join(lines))
    drafts = ["--draft", DRAFT, "--draft", "lookup", "--draft-length", "2"]
    command = ["benchmark", folder, *drafts, "-m", "6", "--passes", "3"]
    report = commands.object(*command, "--prompts-file", file)
    assert [arm["name"] for arm in report["arms"]] == [
        *("no draft", "mlx-lm, no draft", "draft, 2 tokens", "lookup, 2 tokens")
    ]
    assert report["drafts"] == [DRAFT, "lookup"]
    assert (report["chat"], report["same"], report["passes"]) == (True, True, 3)
    generator = SpeculativeGenerator.from_pretrained(folder)
    expected = sum(
        max(2, len(generator.generate(f"<{text}>", max_tokens=6).tokens))
        for text in ("def f(x):", "class A", "import")
    )
    for arm in report["arms"][2:]:
        assert arm["statistics"]["emitted"] == expected
    raw = commands.object(*command, "--prompts-file", file, "--ignore-chat-template")
    assert raw["chat"] is False
    file.write_text(json.dumps("def add(first, second):\n"))
    longer = [*command[:-3], "24", "--passes", "1", "--ignore-chat-template"]
    ended = commands.object(*longer, "--prompts-file", file)
    (arm,) = [arm for arm in ended["arms"] if arm["name"] == "draft, 2 tokens"]
    assert arm["statistics"]["emitted"] == 6  # the text ends by itself here


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("\n", "holds 0 prompts"),
        ('{"turns": []}', "Line 1 of --prompts-file"),
        ('"x"\n{"text": "y"}', "Line 2 of --prompts-file"),
        ("{", "is not JSON"),
    ],
)
def test_a_file_without_prompts_is_refused(
    commands: Commands, tmp_path: Path, lines: str, said: str
) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(lines)
    assert said in commands.refused(*PAIR, "--prompts-file", file)


@pytest.mark.parametrize("near", [True, False])
def test_a_text_that_differs_fails_unless_rounding_decides(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, near: bool
) -> None:
    generate = SpeculativeGenerator.generate

    def wrong(self: SpeculativeGenerator, prompt: Any, **options: Any) -> Any:
        result = generate(self, prompt, **options)
        if options["draft_length"]:
            result.tokens[3] += 1
        return result

    def parted(*_: Any, **__: Any) -> Parting:
        return Parting(
            3, 1, 2, margin=0.5, difference=0.0, allowed=1.0 if near else 0.0, edge=1.0
        )

    monkeypatch.setattr(SpeculativeGenerator, "generate", wrong)
    monkeypatch.setattr(texts, "find_parting", parted)
    done = commands(*SHORT)
    assert done.exit_code == (0 if near else 1)
    if near:
        said = "\nAll texts are those of plain decoding, with 2 near-ties.\n"
    else:
        said = "\nA TEXT DIFFERS from plain decoding's: token 3 is 2"
        assert commands.object(*SHORT, status=1)["same"] is False
    assert said in done.stdout


@pytest.mark.parametrize(("calls", "passes"), [(7, 1), (3, 0)])
def test_ctrl_c_shows_the_passes_that_are_whole(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, calls: int, passes: int
) -> None:
    run, left = measure._run, [calls]

    def interrupted(*arguments: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return run(*arguments)

    monkeypatch.setattr(measure, "_run", interrupted)
    done = commands(*SHORT, "--json")
    assert done.exit_code == 130
    if passes:
        assert '"passes": 1' in done.stdout
        assert '"emitted": 6' in done.stdout
    else:
        assert done.stdout == ""
        assert "interrupted" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([DRAFT], "There is no draft to measure. Give --draft a folder"),
        ([*PAIR[1:], "--draft-length", "0"], "--draft-length is 0, which is plain"),
        ([*PAIR[1:], "-p", ""], "A --prompt is empty. Give it a text."),
        ([*PAIR[1:], "--plot", "out.txt"], "ending must be one of"),
        ([*PAIR[1:], "--plot", "nowhere/out.png"], "there is no folder"),
        ([*PAIR[1:], "--temp", "-1"], "temperature is -1.0"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    commands: Commands, options: list[str], said: str
) -> None:
    assert said in commands.refused("benchmark", *options)
