"""Finding the parts of a model by running it, and observing its calls.

Embedding, layers, final norm and output layer of any mlx-lm model, the hidden states
that a forward shows, and output layers of some ids. It knows no drafter and no cache.
"""
