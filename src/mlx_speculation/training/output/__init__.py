"""Outputs of a training in addition to the draft: record, card, plot, and pairing.

    record       training.json and README.md
    curves       the plot of loss and acceptance
    preflight    a check that the outputs can be written
    speeds       tokens per second with the draft and without, measured
    summary      the record's data, and speculation.json of the target if the draft pays

These modules do not depend on the training loop.
"""
