"""Training of drafters for a target: a new head, its MTP head, or a small model.

The package does not depend on the command line.
"""
