"""Mutants from cosmic-ray's operators, less those that change nothing.

The one file that needs cosmic-ray.
"""

import ast
import json
import random
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from mutation.mutant import ROOT, Mutant, digests, sources


def write_mutants(
    folder: Path, of: str, sample: int, seed: int, file: str | None = None
) -> dict[str, Any]:
    """Write a sample of a folder's mutants and return what is known of it.

    Only those of `file`, a name in the folder, where it is not None.

    Raises:
        SystemExit: the folder has no such file.
    """
    from cosmic_ray.commands.init import _all_work_items

    paths = [path for path in sources(of) if file in (None, path.name)]
    if not paths:
        raise SystemExit(f"{of} has no file {file}")
    specs = [item.mutations[0] for item in _all_work_items(paths, {})]
    random.Random(seed).shuffle(specs)
    chosen = list(islice(_mutants(paths, specs), sample))
    folder.mkdir(parents=True)
    for index, mutant in enumerate(chosen):
        text = json.dumps(asdict(mutant))
        (folder / f"{index:04}.json").write_text(text, encoding="utf-8")
    facts = {"of": of, "file": file, "seed": seed}
    facts |= {"places": len(specs), "sampled": len(chosen)}
    text = json.dumps({**facts, "sources": digests(of)})
    (folder / "facts.json").write_text(text, encoding="utf-8")
    return facts


def _mutants(paths: list[Path], specs: list[Any]) -> Iterator[Mutant]:
    """Yield every mutant that runs, and runs other code than its file."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    texts = {str(path): path.read_text(encoding="utf-8") for path in paths}
    known = {_behaviour(text) for text in texts.values()}
    for spec in specs:
        where = str(spec.module_path)
        operator = get_operator(spec.operator_name)(**spec.operator_args)
        mutated = mutate_code(texts[where], operator, spec.occurrence)
        behaviour = mutated and _behaviour(mutated)
        if not mutated or not behaviour or behaviour in known:
            continue
        known.add(behaviour)
        path = str(Path(where).relative_to(ROOT))
        yield Mutant(path, spec.operator_name, spec.occurrence, mutated)


class _Bare(ast.NodeTransformer):
    """Takes out what does nothing at run time."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if isinstance(node.value, ast.Constant) else node


def _behaviour(source: str) -> str | None:
    """Return what runs, in a form to compare; None where nothing can."""
    try:
        return ast.dump(_Bare().visit(ast.parse(source)))
    except SyntaxError:  # cosmic-ray takes the star of a signature for an operator
        return None
