"""The roles of a prefix cache: the target, draft models, and heads on the target.

A mark identifies a role in files, across processes. It is a hash of the loaded model,
not of the model's folder or revision: the files in a folder can change, and copies in
two folders are the same model.
"""

import hashlib
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_speculation.caches.snapshots.snapshot import Snapshot, merge, split
from mlx_speculation.caches.snapshots.take import snapshot
from mlx_speculation.caches.types.fixed_view import FixedShape
from mlx_speculation.caches.types.leaves import check_single
from mlx_speculation.environment import versions
from mlx_speculation.errors import InvalidRequestError


class Role(NamedTuple):
    """The target, a draft model or a head. The target's index is 0."""

    owner: weakref.ref[Any]  # the model or head
    empty: Snapshot  # of new caches
    lag: int = 0  # row m is computed from the tokens [0, m + lag]
    mark: str = ""  # the same in all processes with this model; empty: no files

    @property
    def stateful(self) -> bool:
        """True if the role can be resumed only at restore points."""
        return any(leaf.whole for leaf in self.empty.leaves)

    def rows(self, stop: int) -> int:
        """Return the number of rows computed from the first `stop` tokens alone."""
        return max(0, stop - self.lag)

    def part(self, kept: Snapshot, start: int, stop: int) -> Snapshot:
        """Return the rows [rows(start), rows(stop))."""
        return split(split(kept, self.rows(stop))[0], self.rows(start))[1]


class Roles(list[Role]):
    """The roles of one prefix cache; none is ever removed."""

    def __init__(self, *, marked: bool) -> None:
        super().__init__()
        self._marked = marked  # whether roles need marks, for files
        self._models: int | None = None  # number of models; later roles are heads
        self._shape: FixedShape | None = None

    def again(self) -> "Roles":
        """Return the same roles with new marks, after a change of weights."""
        again = Roles(marked=self._marked)
        again._models, again._shape = self._models, self._shape
        for role in self:
            again._add(role)
        return again

    def _add(self, role: Role) -> None:
        owner = role.owner()
        if self._marked and owner is not None:
            kinds = [(x.place, x.kind.__name__, x.settings) for x in role.empty.leaves]
            said = f"{len(self)} {kinds} {role.lag} {_rows(self._shape)} "
            digest = hashlib.sha256((said + fingerprint(owner)).encode())
            role = role._replace(mark=digest.hexdigest())
        self.append(role)

    def bind(
        self,
        owners: Sequence[Any],
        caches: Sequence[Sequence[Any]],
        shape: FixedShape | None,
    ) -> bool:
        """Bind to these models; return False if already bound. See `PrefixCache`."""
        for each in caches:
            check_single(each)
        new_roles = [
            Role(weakref.ref(owner), snapshot(each, 0, 0))
            for owner, each in zip(owners, caches, strict=True)
        ]
        if self._models is None:
            self._models, self._shape = len(new_roles), shape
            for role in new_roles:
                self._add(role)
            return True
        roles = self[: self._models]
        mine = [role.owner() for role in roles]
        same = len(mine) == len(owners) and all(
            one is other for one, other in zip(mine, owners, strict=True)
        )
        if not same:
            raise InvalidRequestError(
                f"The prefix cache belongs to {_named(mine)}, but was passed for "
                f"{_named(owners)}. Make a PrefixCache for each pair of target and "
                "draft."
            )
        if self._shape != shape:
            raise InvalidRequestError(
                f"The prefix cache was filled with exact={_rows(self._shape)}, but was "
                f"passed with exact={_rows(shape)}. Make a PrefixCache for each value "
                "of exact."
            )
        for present, other in zip(roles, new_roles, strict=True):
            merge(
                present.empty, other.empty
            )  # refuses caches of other kinds and settings
        return False

    def bind_head(self, owner: Any, caches: Sequence[Any], lag: int) -> int:
        """Return the index of a head's role; add the role if it is new."""
        owners = [each.owner() for each in self]
        for index in range(self._models or 0, len(owners)):
            if owners[index] is owner:
                return index
        self._add(Role(weakref.ref(owner), snapshot(caches, 0, 0), lag))
        return len(owners)


def fingerprint(model: nn.Module) -> str:
    """Return the fingerprint of a model or head, 64 hexadecimal digits.

    It covers everything that determines the model's rows: the bytes, names, shapes and
    dtypes of all parameters, the model's arguments, each module's class and plain
    settings (such as the scale of an adapter), and the versions of Python, mlx and
    other packages.
    """
    arrays: Any = sorted(tree_flatten(model.parameters()), key=lambda pair: pair[0])
    flat = [array.reshape(-1).view(mx.uint8) for _, array in arrays]
    mx.eval(flat)
    modules = sorted(model.named_modules(), key=lambda pair: pair[0])
    said: list[Any] = [versions(), getattr(model, "args", None)]
    said += [(name, _kind(module), _settings(module)) for name, module in modules]
    said += [(name, array.shape, array.dtype) for name, array in arrays]
    digest = hashlib.sha256(repr(said).encode())
    with ThreadPoolExecutor() as threads:  # hashing releases the interpreter lock
        for part in threads.map(hashlib.blake2b, map(memoryview, flat)):
            digest.update(part.digest())
    return digest.hexdigest()


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the numbers and strings among the public attributes of a module."""
    return sorted(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, int | float | str) and not name.startswith("_")
    )


def _rows(shape: FixedShape | None) -> int | None:
    return None if shape is None else shape.rows


def _named(owners: Sequence[Any]) -> str:
    return " and ".join("none" if x is None else type(x).__name__ for x in owners)
