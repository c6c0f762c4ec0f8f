"""Import order of a program: mlx before this package or after it."""

import ast


def mlx_comes_first(code: str) -> bool:
    """Return whether the code imports mlx or mlx_lm, and this package after it."""
    tops = []
    for node in ast.parse(code).body:
        if isinstance(node, ast.Import):
            tops += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            tops.append(node.module.partition(".")[0])
    if "mlx_speculation" not in tops:
        return False
    return bool({"mlx", "mlx_lm"} & set(tops[: tops.index("mlx_speculation")]))
