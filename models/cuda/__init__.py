"""What serves NVIDIA GPUs only: kernels for few rows, and shapes that cuDNN knows.

Known to `models.ops` and to the code that installs hooks, and to nothing else: without
this folder all texts stay the same, and rounds take longer.
"""
