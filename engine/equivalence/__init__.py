"""Whether drafted and plain decoding agree, for `mlx-speculation check`.

`rows` compares verified rows with single ones, `texts` two texts, `report` says it in a
word. A diagnostic: no round runs through this room.
"""
