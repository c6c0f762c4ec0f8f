"""Kinds of drafters that can be trained, each as a `Trainee`.

    eagle_head      a new EAGLE-3 head
    block_drafter   a new drafter of blocks, DFlash or DSpark
    mtp_head        the MTP head that a target has
    small_model     a small model of the target's family

`new_head` has what the first two begin with.

How they are trained is not known here.
"""
