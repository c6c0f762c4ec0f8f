"""Trains the EAGLE-3 head of the bundled dense model.

Framework: PyTorch (bfloat16 autocast, `torch.compile`); the checkpoint is written in
the layout of EAGLE-3 heads, 8 bits. Machine: one NVIDIA H200. Seed: 20261121.

The head reads the outputs of layers 1, 3 and 5 and drafts from the 1,792 most frequent
of 2,048 token ids. It is unrolled six times in training, since a draft is made from
drafts. Corpus, tokenizer and held-out split are those of train_demo_models.py.

The bundled head took 252 s for 2,592 steps of 32 x 1,024 tokens, after 73 s for the
target's own texts and 68 s to compile. Mean accepted tokens on held-out text, of four
and of eight drafts: code 3.03 and 4.94, prose 2.64 and 3.92, edit pairs 3.05 and 4.95.

    python scripts/train_eagle_head.py --work .train --out out --seconds 270

The tokens are prepared in `--work` where they are missing (half a minute); then follow
the target's own texts, as many steps as fit into `--seconds`, and the agreement on
held-out text. It writes `out/eagle` (config.json, model.safetensors) and
`out/eagle.json`, whose `steps` repeat the run exactly:

    python scripts/train_eagle_head.py --work .train --out out --steps STEPS

A try without an accelerator, on two threads, in two minutes:

    python scripts/train_eagle_head.py --device cpu --steps 3 --rows 2 --own-rows 2
"""

import argparse
from pathlib import Path

DEMO = Path(__file__).parent.parent / "src" / "mlx_speculation" / "demo"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path(".train"))
    parser.add_argument("--out", type=Path, default=Path(".train/out"))
    parser.add_argument("--demo", type=Path, default=DEMO)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int, default=0)
    length.add_argument("--seconds", type=float)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--own-rows", type=int, default=1536)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def main() -> None:
    """Prepares what is missing, and trains."""
    from demo_training.data.prepare import prepare_again
    from demo_training.train.eagle import train_eagle
    from demo_training.train.optimise import Plan

    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.work / "tokens.npz").is_file():
        prepare_again(options.work, options.demo / "dense" / "tokenizer.json")
    train_eagle(
        options.work,
        options.demo,
        options.out,
        Plan(options.steps, options.rows, options.rate, seed=options.seed),
        options.device,
        seconds=options.seconds,
        own_rows=options.own_rows,
    )


if __name__ == "__main__":
    main()
