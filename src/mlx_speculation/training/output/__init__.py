"""Outputs of a training in addition to the draft: record, card, plot, and pairing.

    record    training.json and README.md
    curves    the plot of loss and acceptance
    speeds    tokens per second with and without the draft, and the target's
              speculation.json if the draft pays

These modules do not depend on the training loop.
"""
