"""Finding the parts of a model by running it and observing its calls.

The parts are embedding, layers, final norm and output layer of any mlx-lm model. This
package also collects hidden states of forwards, and makes output layers for only some
token ids. It does not know drafters or caches.
"""
