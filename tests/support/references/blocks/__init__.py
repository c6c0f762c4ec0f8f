"""Block drafters and EAGLE-3 dialects in plain numpy, from published facts alone.

`dspark`, `dflash2`, `p_eagle` and `eagle3_dialects` each have one `forward`. It takes a
checkpoint as it is published (tensor names, config.json) and the states of the target,
and returns the logits of every drafted position over the vocabulary of the target.
Everything is computed in float64, over the whole text, without caches.

The modules use neither mlx_speculation nor mlx. The package transformers computes the
frequencies of scaled rotations.
Symbols in docstrings: n committed tokens whose states are known, k drafted tokens, H
hidden size of the drafter, Ht of the target, V vocabulary of the target, Vd of the
drafter, B block size, r Markov rank, m tapped layers.
Weights of linear layers are [out, in]. Where the sources disagree, a keyword of
`forward` chooses the reading.
"""
