"""Rules for rooms (folders of modules) and the imports between them.

    ORDER       the layers of each folder, from the bottom to the top
    NAMED_ALIKE file names that have the same role in every room with such a file
    BELOW       what each top-level folder may import beside itself
    SEALED      rooms for one kind of machine, and their permitted importers

Imports under `TYPE_CHECKING` are checked too. A name that an `__init__` exports counts
as imported from the module that defines it.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parent.parent
FRONT = "src/mlx_speculation"
FOLDERS = ("samplers", "caches", "models", "engine")
FULL = 15
LONG = 400
# Largest number of lines of a function and of a class, docstrings included
LONGEST = {ast.FunctionDef: 60, ast.AsyncFunctionDef: 60, ast.ClassDef: 250}

# A layer may import from earlier layers; rooms of one layer do not import each other.
# A layer that has a folder's name, such as "engine", is for the modules that no other
# layer names.
ORDER: dict[str, list[set[str]]] = {
    "samplers": [
        {"samplers/acceptance", "samplers/row_context"},
        {"samplers/constraints", "samplers/noise"},
        {"samplers/sampling"},
        {"samplers/user_sampler"},
        {"samplers/logits", "samplers/rules"},
        {"samplers"},
    ],
    "caches": [
        {
            "caches/journal",
            "caches/keep_counts",
            "caches/nbytes",
        },
        {"caches/types"},
        {"caches/journals"},
        {"caches/registry"},
        {"caches/speculation", "caches/kv_quantization"},
        {"caches/snapshots"},
        {"caches/files"},
        {"caches/prefix"},
    ],
    "models": [
        {"models"},
        {"models/introspect"},
        {"models/cpu", "models/cuda"},
        {"models/ops"},
        {"models/recurrent"},
        {"models/lanes"},
        {"models/checkpoints"},
        {"models/mtp", "models/eagle", "models/dflash", "models/gemma_assistant"},
        {"models/dflash2", "models/dspark"},  # built on DFlash
        {"models/vision"},
        {"models/load_model"},  # recognizes heads, and loads vision models
    ],
    "engine": [
        {
            "engine/argument_checks",
            "engine/memory",
            "engine/prefix_reuse",
            "engine/prompt",
            "engine/result",
            "engine/stats",
            "engine/timing",
            "engine/token_origin",
        },
        {"engine/drafters", "engine/lookup"},
        {"engine/shared_drafters"},
        {"engine/draft_length"},
        {"engine/round", "engine/exact_verdict"},
        {"engine/distributed"},
        {"engine/detokenizer"},
        {"engine/options", "engine/stream"},
        {"engine/batch"},
        {"engine/config"},
        {"engine/stream_factory"},
        {"engine"},
        {"engine/mlx_lm_compat", "engine/equivalence"},
    ],
    FRONT: [
        {FRONT},
        {f"{FRONT}/blas"},
        {f"{FRONT}/before_mlx"},
        {
            f"{FRONT}/training/{name}"
            for name in ("options", "unroll", "many_blocks", "loss")
        },
        {f"{FRONT}/training/data"},
        {f"{FRONT}/training/kinds"},
        {f"{FRONT}/training"},
        {f"{FRONT}/training/output"},
        {f"{FRONT}/training/training_run"},
        {
            f"{FRONT}/cli",
            f"{FRONT}/server/api_errors",
            f"{FRONT}/server/config",
        },
        {f"{FRONT}/server/schemas"},
        {f"{FRONT}/server/request"},
        {f"{FRONT}/server/answer_parts"},
        {f"{FRONT}/server/job"},
        {f"{FRONT}/server/apis", f"{FRONT}/server/prompts"},
        {f"{FRONT}/server"},
        {f"{FRONT}/cli/commands"},
        {f"{FRONT}/cli/__init__", f"{FRONT}/cli/app"},
        {f"{FRONT}/__main__"},
    ],
}
# Rooms that are treated as part of another room.
TOGETHER = {"engine/lookup": "engine/drafters"}

# For each sealed room: what may import it from outside.
DISPATCH = "models/ops/dispatch"
SEALED = {"models/cpu": {DISPATCH}, "models/cuda": {DISPATCH}}

NAMED_ALIKE = {
    "base": "the protocols and value types of a room",
    "load": "a folder or file in, an object out",
    "head": "the module of a draft head",
    "config": "options or config.json, checked",
    "probe": "which convention a drafter was trained with",
    "generator": "what a user makes, for one request or for many",
    "calibrate": "the measurement of rounds' costs, and the command for it",
    "attention": "attention in a round: CPU, CUDA",
    "registration": "what a sealed room serves",
    "request": "one request",
    "options": "what a caller asks for",
    "stream": "one running generation, and its options",
    "registry": "the table of the kinds that are known",
    "families": "the known families, and what is known about each",
    "restore_points": "states that are taken on the way",
    "ragged_kv": "RaggedKVCache and its journal",
    "sliding_kv": "SlidingKVCache and its journal",
    "__init__": "opens a room",
}

# Rooms and modules of src/mlx_speculation that every folder may import.
SHARED = {
    f"{FRONT}/{name}"
    for name in (
        "blas",
        "environment",
        "errors",
        "interrupts",
        "json_files",
        "measured_file",
        "shell_commands",
        "warn",
    )
}
# What each folder may import, beside itself.
BELOW = {
    "samplers": SHARED,
    "caches": SHARED,
    "models": {"caches", "samplers", *SHARED},
    "engine": {"models", "caches", "samplers", *SHARED},
}
# Only these parts of src/mlx_speculation may import the engine.
DOORS = {f"{FRONT}/{name}" for name in ("__init__", "cli", "server", "training")}


@cache
def modules() -> tuple[str, ...]:
    """Return the paths of all product modules, without `.py`."""
    paths = [
        path.relative_to(ROOT).with_suffix("").as_posix()
        for folder in (*FOLDERS, FRONT)
        for path in (ROOT / folder).rglob("*.py")
        if path.relative_to(ROOT / folder).parts[0] not in {*FOLDERS, "demo"}
    ]
    return tuple(sorted(paths))


@cache
def all_modules() -> frozenset[str]:
    return frozenset(modules())


def room_of(module: str) -> str:
    return str(PurePosixPath(module).parent)


def folder_of(module: str) -> str:
    """Return the top-level folder of a module."""
    return FRONT if module.startswith(FRONT) else module.partition("/")[0]


def is_opening(module: str) -> bool:
    """Return whether a module is the `__init__` of a top-level folder."""
    return module in {f"{folder}/__init__" for folder in ORDER}


@cache
def source(module: str) -> str:
    return (ROOT / f"{module}.py").read_text("utf-8")


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module, also those that only type checkers read."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.expr):
            continue  # has no imports
        yield child
        yield from nodes(child)


def path_of(dotted: str) -> str | None:
    """Return the module of a dotted name; None: no module of this package."""
    parts = dotted.split(".")
    if parts[0] != "mlx_speculation":
        return None
    rest = "/".join(parts[1:])
    top = rest if parts[1:2] and parts[1] in FOLDERS else f"{FRONT}/{rest}".rstrip("/")
    return next((m for m in (top, f"{top}/__init__") if m in all_modules()), None)


@cache
def exports(module: str) -> dict[str, str]:
    """Return the module that defines each name of an `__init__`."""
    homes = {}
    for node in nodes(ast.parse(source(module))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                home = home_of(node.module, alias.name)
                if home is not None:
                    homes[alias.asname or alias.name] = home
    return homes


def home_of(dotted: str, name: str) -> str | None:
    """Return the module that defines `name` of `from dotted import name`."""
    module = path_of(dotted)
    if module is None:
        return path_of(f"{dotted}.{name}")
    if module.endswith("__init__"):
        taken = exports(module).get(name)
        return taken or path_of(f"{dotted}.{name}") or module
    return module


@cache
def imports(module: str) -> frozenset[str]:
    imported: set[str | None] = set()
    for node in nodes(ast.parse(source(module))):
        assert not getattr(node, "level", 0), f"{module} has a relative import"
        if isinstance(node, ast.Import):
            imported |= {path_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {home_of(node.module, alias.name) for alias in node.names}
    return frozenset(each for each in imported if each is not None and each != module)


def layer_of(module: str) -> int:
    """Return the layer of a module in its folder, by its name or else by its room."""
    layers = ORDER[folder_of(module)]
    name = module
    while name not in {"", "."}:
        for number, names in enumerate(layers):
            if name in names:
                return number
        name = str(PurePosixPath(name).parent)
    raise AssertionError(f"{module} is in no layer of ORDER: give its room a place")


def together(module: str) -> str:
    """Return the room of a module, or the room that TOGETHER gives for it."""
    return TOGETHER.get(room_of(module), room_of(module))


def edges() -> Iterator[tuple[str, str]]:
    """Yield (importer, imported) for imports between rooms of the same folder."""
    for module in modules():
        if is_opening(module):
            continue
        for other in sorted(imports(module)):
            if folder_of(module) == folder_of(other) and not is_opening(other):
                yield module, other


def back_edges() -> set[str]:
    """Return imports from a higher layer, or from another room of the same layer."""
    upward = set()
    for module, other in edges():
        here, there = layer_of(module), layer_of(other)
        across = here == there and together(module) != together(other)
        if there > here or across:
            upward.add(f"{module} -> {other}")
    return upward


def outward() -> set[str]:
    """Return imports that BELOW forbids, and imports of the engine outside DOORS."""
    wrong = set()
    for module in modules():
        folder, name = folder_of(module), f"{module}/"
        for other in imports(module):
            if folder == FRONT:
                door = name.startswith(tuple(f"{each}/" for each in DOORS))
                allowed = door or not other.startswith("engine/")
            else:
                below = tuple(f"{each}/" for each in {folder, *BELOW[folder]})
                allowed = f"{other}/".startswith(below)
            if not allowed:
                wrong.add(f"{module} -> {other}")
    return wrong


def too_full() -> dict[str, int]:
    count: dict[str, int] = defaultdict(int)
    for module in modules():
        count[room_of(module)] += not module.endswith("__init__")
    return {room: number for room, number in count.items() if number > FULL}


def too_long() -> dict[str, int]:
    lines = {module: source(module).count("\n") for module in modules()}
    return {module: number for module, number in lines.items() if number > LONG}


def named_alike() -> dict[str, list[str]]:
    rooms: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        rooms[PurePosixPath(module).name].append(room_of(module))
    return {name: places for name, places in rooms.items() if len(places) > 1}


def unsealed() -> set[str]:
    """Return forbidden imports of sealed rooms."""
    return {
        f"{module} -> {other}"
        for module in modules()
        if not is_opening(module)
        for other in imports(module)
        for room in [room_of(other)]
        if room in SEALED and not {module, room_of(module)} & {room, *SEALED[room]}
    }


def test_imports_between_rooms_point_one_way() -> None:
    assert not back_edges()


def test_imports_between_folders_point_one_way() -> None:
    assert not outward()


def test_no_room_is_too_full() -> None:
    assert not too_full(), f"at most {FULL} modules: divide the room"


def test_no_module_is_too_long() -> None:
    assert not too_long(), f"at most {LONG} lines: divide the module"


def test_no_function_and_no_class_is_too_long() -> None:
    too_long_parts = [
        f"{module}: {node.name}"
        for module in modules()
        for node in ast.walk(ast.parse(source(module)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and (node.end_lineno or 0) - node.lineno >= LONGEST[type(node)]
    ]
    assert not too_long_parts


def test_a_file_name_says_the_same_in_every_room() -> None:
    assert named_alike().keys() == NAMED_ALIKE.keys(), named_alike()


def test_sealed_rooms_are_known_to_dispatch_alone() -> None:
    assert not unsealed()


@pytest.mark.parametrize("room", sorted({room_of(m) for m in modules()}))
def test_each_room_says_what_lives_there_and_what_it_does_not_know(room: str) -> None:
    opening = f"{room}/__init__"
    assert opening in modules()
    said = ast.get_docstring(ast.parse(source(opening)))
    assert said is not None
    assert len(said.splitlines()) > 1


def test_imports_that_only_type_checkers_read_count() -> None:
    tree = ast.parse("if TYPE_CHECKING:\n    from mlx_speculation.engine import Stream")
    assert any(isinstance(node, ast.ImportFrom) for node in nodes(tree))


def test_names_are_followed_to_where_they_are_from() -> None:
    assert home_of("mlx_speculation.caches", "Speculation") == "caches/speculation"
    assert home_of("mlx_speculation.samplers", "verifier") == "samplers/verifier"
    assert home_of("numpy", "array") is None
