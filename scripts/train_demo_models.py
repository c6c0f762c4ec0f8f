"""Trains the demo models that ship with the package, from Python's own text.

Framework: PyTorch (bfloat16 autocast, `torch.compile`); the checkpoints are written in
mlx-lm's layout. Machine: one NVIDIA H200; the three targets train side by side, and so
do the draft and the head. Seed: 20261121.

The bundled models took, in seconds of that sharing: dense 103, sliding 118, hybrid 236
(1,800 steps of 32 x 1,024 tokens each), the targets' own texts about 40, draft 287
(5,400 steps of 64 x 1,024 tokens), head 159 (2,400 steps of 32 x 1,024 tokens).

Held-out loss in nats per token, float then quantized:

              code           prose          edit pairs
    dense     2.047 2.048    2.430 2.432    1.418 1.418
    sliding   2.035 2.037    2.440 2.443    1.430 1.432
    hybrid    2.010 2.011    2.392 2.393    1.408 1.408
    draft     2.225 2.225    2.609 2.608    1.579 1.579

More passes over so little text only memorise it: after 4,000 steps the dense target's
loss on held-out code was 2.165.

Stages, in this order (the first and the last run on any machine):

    python scripts/train_demo_models.py prepare
    python scripts/train_demo_models.py target --name dense   # sliding, hybrid
    python scripts/train_demo_models.py own --name dense --rows 1536   # the same
    python scripts/train_demo_models.py draft --steps 5400 --rows 64 --rate 3e-3
    python scripts/train_demo_models.py head --steps 2400
    python scripts/train_demo_models.py finish
"""

import argparse
from pathlib import Path

DEMO = Path(__file__).parent.parent / "src" / "mlx_speculation" / "demo"
STAGES = ("prepare", "target", "own", "draft", "head", "finish")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--name", choices=["dense", "sliding", "hybrid"])
    parser.add_argument("--work", type=Path, default=Path(".train"))
    parser.add_argument("--out", type=Path, default=Path(".train/out"))
    parser.add_argument("--demo", type=Path, default=DEMO)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.stage in {"target", "own"} and options.name is None:
        parser.error(f"the stage {options.stage} needs --name")
    return options


def main() -> None:
    """Runs one stage."""
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stage == "prepare":
        from demo_training.data.prepare import prepare

        prepare(options.work, options.demo)
    elif options.stage == "finish":
        from demo_training.export.cards import finish

        finish(options.work, options.out, options.demo)
    else:
        train(options)


def train(options: argparse.Namespace) -> None:
    """The stages that need torch."""
    from demo_training.train.draft import train_draft, write_own_texts
    from demo_training.train.head import train_head
    from demo_training.train.optimise import Plan
    from demo_training.train.targets import train_target

    work, out, device = options.work, options.out, options.device
    plan = Plan(options.steps, options.rows, options.rate, seed=options.seed)
    if options.stage == "target":
        train_target(options.name, work, out, plan, device)
    elif options.stage == "own":
        write_own_texts(options.name, work, out, options.rows, options.seed, device)
    elif options.stage == "draft":
        train_draft(work, out, plan, device)
    else:
        train_head(work, out, plan, device)


if __name__ == "__main__":
    main()
