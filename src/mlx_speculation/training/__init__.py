"""Training of a target's drafter: a new head, the target's MTP head, a small model.

The package does not depend on the command line.
"""
