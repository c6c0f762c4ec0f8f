"""Outputs of a training in addition to the draft.

    record    training.json and README.md
    curves    the plot of loss and acceptance
    speeds    tokens per second, and the target's speculation.json if the draft pays

These modules do not depend on the training loop.
"""
