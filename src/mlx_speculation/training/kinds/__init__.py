"""What can be trained, each as a `Trainee`: see `trainee`.

    eagle_head    a new EAGLE-3 head
    mtp_head      the MTP head that a target has
    small_model   a small model of the target's family

How they are trained is not known here.
"""
