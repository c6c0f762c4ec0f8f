"""What a training leaves beside the draft: a record, a card, a plot, and its pairing.

    record       training.json and README.md
    curves       the plot of loss and acceptance
    speeds       tokens per second with the draft and without, measured here
    pair_file    speculation.json of the target, if the draft pays

How drafts are trained is not known here.
"""
