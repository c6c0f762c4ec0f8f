"""Training of drafters for a target: a new head, its MTP head, or a small model.

The package makes the data, trains the drafter and writes its files. It uses the models
and the engine, and does not depend on the command line or a terminal.
"""
