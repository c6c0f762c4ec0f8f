"""The prefix cache: what earlier requests left, for requests that begin alike.

A compressed tree of token runs with the snapshots of each. It knows tokens and
snapshots; it does not know models, streams or text.
"""
