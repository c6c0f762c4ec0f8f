"""Recorded traces of real rounds, which `bench.replays` has made and replays."""

from pathlib import Path

TRACES = Path(__file__).with_name("traces.npz")
# Of other prompts, and of a sampled text: no policy was chosen by them.
HELD_OUT = Path(__file__).with_name("held_out.npz")
