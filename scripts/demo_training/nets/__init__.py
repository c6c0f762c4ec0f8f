"""The networks of the bundled models, in torch, and their shapes."""
