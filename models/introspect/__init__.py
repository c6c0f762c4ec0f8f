"""Finding the parts of a model by running it and observing its calls.

The parts are embedding, layers, final norm and output layer. This package also collects
hidden states, and makes output layers for some token ids.
"""
