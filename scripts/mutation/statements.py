"""Which lines tell that a test has run a changed line.

A changed line is part of a statement, and the tests that ran any line of it may see
the change. Of a compound statement only the lines outside its blocks count: for

    1  while left > 0:
    2      left -= 1

a change in line 1 is seen by tests that ran line 1. Knows nothing of tests.
"""

import ast

Block = ast.stmt | ast.ExceptHandler
_Function = ast.FunctionDef | ast.AsyncFunctionDef
# The compiler may leave no trace of these lines, or of the head of `while True`.
_TRACELESS = (ast.Pass, ast.Break, ast.Continue, ast.Global, ast.Nonlocal)


def telling_lines(source: str, changed: set[int]) -> set[int] | None:
    """Return the lines whose tests may see a change; None: it runs at import."""
    tree = ast.parse(source)
    found: set[int] = set()
    for line in changed:
        lines = _telling(_around(tree, line))
        if lines is None:
            return None
        found |= lines
    return found


def _around(tree: ast.Module, line: int) -> list[Block]:
    """Return the blocks that hold a line, from the outermost to the innermost."""
    path: list[Block] = []
    node: ast.AST = tree
    while True:
        inner = [child for child in _blocks(node) if line in _range(child)]
        if not inner:
            return path
        # Two statements on one line: both are told by it.
        node = inner[0]
        path.append(inner[0])


def _telling(path: list[Block]) -> set[int] | None:
    functions = [node for node in path if isinstance(node, _Function)]
    if not functions:
        return None
    inner = path[-1]
    if not isinstance(inner, _Function):
        own = _own(inner)
        if isinstance(inner, ast.While):
            own.add(inner.body[0].lineno)
        if isinstance(inner, _TRACELESS):
            own |= _own(path[-2])
        return own
    # A decorator, a default or the name: it tells by what the function does. The
    # head of a function inside a function runs with the outer one.
    body = set(range(inner.body[0].lineno, _end(inner)))
    return body | _head(inner) if len(functions) > 1 else body


def _blocks(node: ast.AST) -> list[Block]:
    """Return the nearest statements and handlers inside a node."""
    found: list[Block] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Block):
            found.append(child)
        elif not isinstance(child, ast.expr):
            found += _blocks(child)  # the cases of a match
    return found


def _own(node: Block) -> set[int]:
    """Return the lines that are in no block inside."""
    lines = set(_range(node))
    for child in _blocks(node):
        lines -= set(_range(child)) - {node.lineno}
    return lines


def _head(node: _Function) -> set[int]:
    return set(range(_range(node).start, node.body[0].lineno))


def _range(node: Block) -> range:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return range(min(n.lineno for n in (node, *decorators)), _end(node))


def _end(node: Block) -> int:
    return (node.end_lineno or node.lineno) + 1
