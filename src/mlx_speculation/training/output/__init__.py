"""Outputs of a training in addition to the draft: record, card, plot, and pairing.

    record    training.json and README.md
    curves    the plot of loss and acceptance
    speeds    tokens per second with the draft and without, and speculation.json of the
              target if the draft pays

These modules do not depend on the training loop.
"""
