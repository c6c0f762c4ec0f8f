"""Training drafters for a target: an EAGLE-3 head, its MTP head, or a small model.

What is trained, and on which data. It knows models and the engine; it knows no command
line and no terminal.
"""
