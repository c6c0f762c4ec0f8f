"""Comparisons of drafted and plain decoding, for `mlx-speculation check`.

`rows` compares the logits of one forward over a draft with those of single steps,
`verdict` judges the result, `texts` compares two texts, and `exact_rows` tests exact
mode.
"""
