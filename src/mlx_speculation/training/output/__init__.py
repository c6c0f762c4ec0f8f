"""Outputs of a training beside the draft: record, card, plot, and pairing.

    record       training.json and README.md
    curves       the plot of loss and acceptance
    speeds       tokens per second with the draft and without, measured here
    summary      what the record says, and speculation.json of the target if it pays

How drafts are trained is not known here.
"""
