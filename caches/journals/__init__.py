"""One journal for each cache class of mlx-lm and of this project.

Each file is named after its cache class, except for four: `deepseek_v41` is named after
the model, `isolated` serves `Speculation(isolated=True)`, and `live` and `ring` hold
base classes.
"""
