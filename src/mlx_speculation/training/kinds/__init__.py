"""Kinds of drafters that can be trained, each as a `Trainee`.

    eagle_head      a new EAGLE-3 head
    block_drafter   a new block drafter, DFlash or DSpark
    mtp_head        the MTP head of a target
    small_model     a small model of the target's family

`new_head` makes the initial weights of the first two.
"""
