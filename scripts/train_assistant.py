"""Trains the assistant of the bundled sliding model, which reads that model's KV.

The layout is that of Gemma 4 assistants. Framework: PyTorch (bfloat16 autocast,
`torch.compile`); machine: one NVIDIA H200; seed 20261121. Corpus, tokenizer and split
are those of `train_demo_models.py`, whose draft and head are trained alike: half on
text, half on what the target itself wrote, four recycled drafts from every position.

The bundled assistant took 2,227 steps of 32 x 1,024 tokens in 227 s, and all stages
405 s. On the target's greedy continuations of held-out text it agrees with the next
token at 93 % (code), 90 % (prose) and 93 % (edit pairs) of the positions, and with all
of the next four at 79, 72 and 79 %.

All in one, 5 to 7 minutes; the text is that of the Python that runs it:

    python3 scripts/train_assistant.py all --out "$OUT"

`prepare` needs no GPU, `own` lets the target write, `train` takes as many steps as fit
into `--seconds`, or `--steps` to repeat a run. It leaves the folder `assistant` in
`--out`, to be put into src/mlx_speculation/demo, and the record `assistant.json`.
"""

import argparse
import time
from pathlib import Path

DEMO = Path(__file__).parent.parent / "src" / "mlx_speculation" / "demo"
STAGES = ("all", "prepare", "own", "train")
TARGET = "sliding"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--work", type=Path, default=Path(".train"))
    parser.add_argument("--out", type=Path, default=Path(".train/out"))
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=200)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--own-rows", type=int, default=1536)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def main() -> None:
    """Runs one stage, or all."""
    from demo_training.data.prepare import prepare_again
    from demo_training.train.assistant import train_assistant
    from demo_training.train.draft import write_own_texts
    from demo_training.train.optimise import Plan

    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    work, device, seed = options.work, options.device, options.seed
    started = time.time()

    def asked(stage: str) -> bool:
        wanted = options.stage in {stage, "all"}
        if wanted:
            print(f"{stage} begins after {time.time() - started:.0f} s", flush=True)
        return wanted

    if asked("prepare"):
        prepare_again(work, DEMO / TARGET / "tokenizer.json")
    if asked("own"):
        write_own_texts(TARGET, work, DEMO, options.own_rows, seed, device)
    if asked("train"):
        plan = Plan(options.steps, options.rows, options.rate, seed=seed)
        train_assistant(work, DEMO, options.out, plan, options.seconds, device)
    print(f"done after {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
