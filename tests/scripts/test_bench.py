"""The runner of the benchmarks: turns, runs, texts, reports, prompts, models."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
import typer
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from bench import forwards
from bench.arms import (
    Arm,
    Job,
    Run,
    count_rounds,
    mlx_lm_arms,
    plain_arms,
    run_by_turns,
)
from bench.models import Bench, bare
from bench.options import folder_of
from bench.prompts import Question, read_questions
from bench.report import Report, reported, shown, table_of
from bench.series import Series, compare, jobs_of, rows_of
from bench.turns import Spread, in_turns, order
from mlx_speculation.caches import position
from mlx_speculation.demo import demo_models
from mlx_speculation.engine import Statistics
from mlx_speculation.models import ModelHooks, load
from mlx_speculation.models.round_context import in_round
from support.covering import others_slow
from support.identity import prompt_of
from support.models.census import BUILT, FEW, build
from support.models.copies import hooked
from support.scripts import save_tiny

PROMPT = prompt_of(9)


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(name="bench")
def _bench(folder: Path) -> Bench:
    return Bench.of(str(folder), str(folder))


def test_another_arm_comes_first_in_every_turn() -> None:
    taken: list[str] = []
    acts = {name: lambda n, name=name: taken.append(f"{name}{n}") for name in "abc"}
    assert in_turns(acts, 3, warm_up=1).keys() == set("abc")
    turns = [taken[n : n + 3] for n in range(0, 12, 3)]
    assert [[each[1] for each in turn] for turn in turns] == [
        [number] * 3 for number in "0012"
    ]
    firsts = [turn[0][0] for turn in turns[1:]]
    assert sorted(firsts) == ["a", "a", "c"] or len(set(firsts)) == 3
    assert order("abc", 0) != order("abc", 1) != order("abc", 2)


def test_a_spread_is_of_the_ratios_of_each_turn() -> None:
    assert Spread.over([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == Spread(2.0, 1.5, 2.5)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)


def run_of(rounds: list[int], tokens: list[int] | None = None, stop: int = -1) -> Run:
    pairs = zip(tokens or [7] * len(rounds), rounds, strict=True)

    def arrivals() -> Any:
        yield from pairs

    return Run(arrivals(), frozenset({stop}), Statistics())


def test_the_first_token_is_not_timed_nor_are_those_of_its_round() -> None:
    run = run_of([1, 1, 2, *[3] * 20])
    run.take()
    assert (run.tokens, run.timed, run.slices) == ([7], 0, [])
    assert run.first_seconds > 0
    run.take()
    assert [count for count, _ in run.slices] == [15]  # 1 of 16 is of the first round
    run.take()
    assert [count for count, _ in run.slices] == [15, 6]
    assert run.ended
    assert len(run.tokens) == 23


def test_a_text_ends_with_a_stop_token() -> None:
    run = run_of([1, 2, 3, 4], [7, 7, 9, 7], stop=9)
    while not run.ended:
        run.take()
    assert run.tokens == [7, 7, 9]
    assert run.timed == 2


def test_arms_decode_the_same_tokens_by_turns(bench: Bench) -> None:
    arms = [*plain_arms(bench), *mlx_lm_arms(bench, [2])]
    taken: list[str] = []
    followed = [replace(arm, begin=noting(taken, arm)) for arm in arms]
    runs = run_by_turns(bench, followed, Job(PROMPT, 40))
    texts = [run.tokens for run in runs.values()]
    assert texts[0] == texts[1] == texts[2]
    assert [run.statistics.emitted for run in runs.values()] == [40] * 3
    # The first token of each run, then slices of 16, 16 and 7.
    bounds = [0, 3, 51, 99, 120]
    slices = [taken[one:other] for one, other in pairwise(bounds)]
    firsts = [part[0] for part in slices]
    assert all(len(set(part)) == 3 for part in slices)
    assert len(set(firsts)) > 1


def noting(taken: list[str], arm: Arm) -> Any:
    def begin(job: Job) -> Run:
        run = arm.begin(job)
        arrivals = run.arrivals

        def noted() -> Iterator[tuple[int, int]]:
            for arrival in arrivals:
                taken.append(arm.name)
                yield arrival

        run.arrivals = noted()  # type: ignore[assignment]
        return run

    return begin


def test_what_mlx_lm_refuses_is_said(bench: Bench) -> None:
    bench.__dict__["bare"] = build("qwen3_5")
    arms = [*plain_arms(bench)[:1], *mlx_lm_arms(bench, [2])]
    _, theirs = compare(bench, [arms[0], arms[1]], [Job(PROMPT, 20)])
    assert theirs.failure is not None
    assert theirs.failure.startswith("refused: ValueError: Speculative decoding")
    assert not theirs.runs


def test_rounds_of_mlx_lm_are_counted_from_its_flags() -> None:
    statistics = Statistics()
    # k = 3, 10 tokens: all accepted and a bonus; one accepted and a correction; only a
    # correction; then the last 3 tokens, all of which were drafted.
    flags = [True] * 3 + [False, True, False, False] + [True] * 3
    count_rounds(statistics, flags, 3, 10)
    assert (statistics.rounds, statistics.drafted, statistics.accepted) == (4, 12, 7)
    assert statistics.emitted == 10
    assert statistics.reached == [3, 2, 2]


def test_a_text_that_is_not_plain_decodings_ends_the_run(bench: Bench) -> None:
    plain, theirs = plain_arms(bench)

    def begin(job: Job) -> Run:
        tokens = bench.plain.generate(job.prompt, max_tokens=job.tokens).tokens
        changed = [*tokens[:5], (tokens[5] + 1) % 256, *tokens[6:]]
        return run_of([*range(job.tokens)], changed)

    wrong = Arm("wrong", begin)
    with pytest.raises(AssertionError, match="wrong: not the text of our plain"):
        compare(bench, [plain, theirs, wrong], [Job(PROMPT, 12)])
    foreign = replace(wrong, ours=False, draft="mlx-lm")
    *_, last = compare(bench, [plain, theirs, foreign], [Job(PROMPT, 12)])
    assert last.text == "wrong from token 5"


def test_ratios_are_to_the_faster_plain_decoding() -> None:
    def series(name: str, seconds: list[float]) -> Series:
        runs = [run_of([]) for _ in seconds]
        for run, spent in zip(runs, seconds, strict=True):
            run.first_seconds, run.slices = 1.0, [(16, spent)]
        return Series(Arm(name, lambda job: runs[0]), runs)

    made = [series("ours", [2, 2]), series("mlx-lm", [1, 2]), series("draft", [1, 0.5])]
    rows = rows_of(made)
    assert [row["tokens_per_second"] for row in rows] == pytest.approx(
        [8, 32 / 3, 64 / 3]
    )
    assert [row["x_plain"] for row in rows] == pytest.approx([0.75, 1, 2])
    assert rows[2]["each"].median == pytest.approx(2.5)
    assert rows[2]["x_whole"] == pytest.approx(5 / 3.5)


def test_a_report_is_a_table_and_a_line_of_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "report.json"
    context: Any = SimpleNamespace(
        info_name="some.py",
        params={"blas": "stock", "json_file": written, "target": "a/b+c/d"},
    )
    with reported(context) as report:
        report.add(arm="one", x=1.5, each=Spread(1, 2, 3), counts={"n": 1})
        report.add(arm="two", y=None)
    *table, line = capsys.readouterr().out.splitlines()
    assert any("one" in row and "1.50" in row and "1 (2..3)" in row for row in table)
    assert not any("counts" in row for row in table)
    data = json.loads(line)
    assert json.loads(written.read_text()) == data
    assert data["benchmark"] == "some"
    assert data["arguments"] == {"blas": "stock", "target": "b+d"}
    assert data["results"][0]["each"] == {"median": 1, "lower": 2, "upper": 3}
    with reported(context) as report:
        report.quiet = True
    assert not capsys.readouterr().out


def test_values_are_shown_with_three_digits() -> None:
    cells = [shown(each) for each in (0.12345, 12345.6, 7, None, "text", 100.0)]
    assert cells == ["0.123", "12346", "7", "", "text", "100"]
    assert [c.header for c in table_of([{"a_b_per_second": 1.0}]).columns] == ["a b/s"]
    assert Report().rows == []


def test_questions_are_grouped_as_spec_bench_does(tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    rows: list[dict[str, Any]] = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question_id": 82, "category": "math", "turns": ["c"]},
        {"question_id": 83, "category": "math_reasoning", "turns": ["d"]},
        {"question_id": 84, "category": "rag", "group": "mine", "turns": ["e"]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n", "utf-8")
    questions = read_questions(file, None, 9)
    turns = {group: [each.turns for each in one] for group, one in questions.items()}
    assert turns == {
        "mt_bench": [("a", "b"), ("c",)],
        "math_reasoning": [("d",)],
        "mine": [("e",)],
    }
    assert [
        each.source for each in read_questions(file, ["mt_bench"], 1)["mt_bench"]
    ] == ["81"]
    with pytest.raises(ValueError, match="no group 'qa'; the groups are mt_bench"):
        read_questions(file, ["qa"], 1)


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"category": "qa"}', '{"category": "qa", "turns": ["  "]}']
)
def test_a_line_that_is_no_question_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(f'{{"category": "qa", "turns": ["a"]}}\n{line}\n', "utf-8")
    with pytest.raises(ValueError, match=r"q\.jsonl, line 2"):
        read_questions(file, None, 1)


def test_a_later_turn_is_asked_after_the_answers(bench: Bench) -> None:
    tokenizer: Any = bench.tokenizer
    question = Question("qa", "1", ("one", "two", "three"))
    assert not tokenizer.has_chat_template
    text = tokenizer.decode(question.prompt(tokenizer, ["A", "B"]))
    assert text == "one\n\nA\n\ntwo\n\nB\n\nthree"
    template = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>"
    tokenizer._tokenizer.chat_template = template
    tokenizer.has_chat_template = True
    text = tokenizer.decode(question.prompt(tokenizer, ["A"]))
    assert text == "<u>one<a>A<u>two<a>"
    raw = replace(question, chat=False).prompt(tokenizer)
    assert tokenizer.decode(raw) == "one"


def test_jobs_ask_later_turns_after_what_plain_decoding_answers(bench: Bench) -> None:
    questions = [Question("qa", "1", ("one", "two")), Question("qa", "2", ("three",))]
    jobs = [*jobs_of(bench, questions, tokens=6, temperature=0.0, seed=4)]
    answer = bench.plain.generate(jobs[0].prompt, max_tokens=6).text
    assert [job.prompt for job in jobs] == [
        questions[0].prompt(bench.tokenizer),
        questions[0].prompt(bench.tokenizer, [answer]),
        questions[1].prompt(bench.tokenizer),
    ]
    assert len(jobs[1].prompt) > len(jobs[0].prompt) + 3
    assert [job.sampling.seed for job in jobs] == [4, 4, 5]


def test_the_bundled_heads_are_known_by_their_folders() -> None:
    beside = demo_models()["draft"].parent
    targets = {"dense", "sliding", "hybrid"}
    folders = {path.parent.name for path in beside.glob("*/config.json")}
    drafts = {name: Bench.of(name).default_drafts for name in targets}
    named = {draft for each in drafts.values() for draft in each}
    others = {"draft", "smollm2_eagle"}  # belong to no bundled target
    assert folders - targets - others == named - {"model", "lookup", "mtp"}
    assert Bench.of(str(folder_of("dense").parent / "other")).default_drafts == [
        "model",
        "lookup",
    ]


@pytest.mark.parametrize("name", others_slow(BUILT, FEW))
def test_a_bare_copy_shares_the_arrays_and_has_no_hooks(name: str) -> None:
    model: Any = build(name)
    ids = mx.array([[1, 2, 3]])
    recorders = ModelHooks(model)
    expected = model(ids).tolist()  # called first: gemma3n clips its weights in a call
    other: Any = bare(model)
    assert other is not model
    recorders.remove()  # the hooks were on `model`
    pairs = [dict(tree_flatten(each.parameters())) for each in (model, other)]
    assert pairs[0].keys() == pairs[1].keys()
    assert all(pairs[1][path] is array for path, array in pairs[0].items())
    kinds = [[type(each) for each in one.modules()] for one in (model, other)]
    assert kinds[0] == kinds[1]
    assert not hooked(other)
    assert other(ids).tolist() == expected


def test_steady_forwards_are_fed_their_own_choices_and_leave_no_rows(
    folder: Path,
) -> None:
    model, _ = load(folder)
    caches = forwards.filled(model, [7, 8, 9])
    step = forwards.step_of(model, caches)
    fed: list[list[int]] = []

    def watched(tokens: mx.array) -> mx.array:
        read: Any = tokens.tolist()
        fed.append(read[0])
        chosen: mx.array = step(tokens)
        return chosen

    assert forwards.steady_seconds(watched, 3, 4, iter(range(9)).__next__) > 0
    assert position(caches) == 3
    assert len(fed) == 6
    for tokens, next_tokens in pairwise(fed):
        fresh = make_prompt_cache(model)
        logits = model(mx.array([[7, 8, 9, *tokens]]), cache=fresh)
        assert next_tokens == [int(logits[0, -1].argmax().item())] * 3


@pytest.mark.parametrize("drafts", [False, True])
def test_single_tokens_take_the_ways_of_a_round_where_they_are_drafts(
    folder: Path, drafts: bool
) -> None:
    """A plain step uses mlx's operations. A draft of one token uses those of rounds."""
    model, _ = load(folder)
    kind: Any = type(model)
    ways: list[bool] = []

    class Watched(kind):  # type: ignore[misc]
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            ways.append(in_round())
            return super().__call__(*arguments, **options)

    caches = forwards.filled(model, [7, 8, 9])
    model.__class__ = Watched
    step = forwards.step_of(model, caches, drafts=drafts)
    for width in (1, 2):
        mx.eval(step(mx.array([[5] * width])))
    assert ways == [drafts, True]
    assert position(caches) == 3


def test_an_unknown_group_is_refused() -> None:
    import spec_bench

    with pytest.raises(typer.BadParameter, match="there is no group 'other'"):
        typer.main.get_command(spec_bench.app).main(
            ["--group", "other"], standalone_mode=False
        )
