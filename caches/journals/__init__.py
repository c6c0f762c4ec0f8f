"""One journal for each cache class of mlx-lm and of this project.

Each file is named after its cache class, except for `isolated`, which is for
`Speculation(isolated=True)`, and for `live` and `ring`, which have base classes.
"""
