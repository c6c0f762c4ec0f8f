"""What serves x86-64 CPUs with OpenBLAS only: cheaper operations in float32.

Known to `models.ops` and to the code that installs hooks, and to nothing else: without
this folder all texts stay the same, and rounds take longer.
"""
