"""Import order of a program: mlx before this package or after it."""

import ast


def mlx_comes_first(code: str) -> bool:
    """Return whether mlx or mlx_lm is imported before this package, which is imported
    too.
    """
    tops = []
    for node in ast.parse(code).body:
        if isinstance(node, ast.Import):
            tops += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            tops.append(node.module.partition(".")[0])
    if "mlx_speculation" not in tops:
        return False
    return bool({"mlx", "mlx_lm"} & set(tops[: tops.index("mlx_speculation")]))
