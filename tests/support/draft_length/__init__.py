"""Traces of real rounds, recorded and replayed by `bench.replays`."""

from pathlib import Path

TRACES = Path(__file__).with_name("traces.npz")
# Traces of other prompts and of a sampled text; no policy was tuned on them.
HELD_OUT = Path(__file__).with_name("held_out.npz")
