"""Agreement of drafted and plain decoding, for `mlx-speculation check`.

`rows` compares verified rows with single ones, `texts` two texts, `report` says it in a
word, and `exact_rows` tries exact mode. A diagnostic: no round runs through this room.
"""
