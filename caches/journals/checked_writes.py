"""Refusing a write that does not fit the contents of a cache, before it is made.

mlx-lm's caches write with slices and concatenations, which silently broadcast a batch
or a head, and convert a dtype. A checked cache first compares the arrays:

    write                               is compared with
    update_and_fetch(keys, values)      the cache's keys and values, and one another
    update_window(kv)                   the cache's window
    cache[slot] = state                 the state in that slot
    cache.name = array                  the array of that name

The rank, the batch (axis 0), the heads (axis 1 of rank 4) and the dtype of the two
arrays have to agree; for keys and values also the width of a row. Keys and values may
differ in dtype, as after a float32 norm over bfloat16 keys. If the cache has no such
array yet, the batch has to agree with its other arrays, such as the left padding, and
batch and dtype with the array of that name in other layers of the same kind. Only if
all caches of a kind are empty can a write have any dtype.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_speculation.errors import InvalidRequestError

Read = Callable[[Any], Any]

# By cache, the checked caches of its model and kind. Weak, since they end with a round.
_peers: "weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]]" = (
    weakref.WeakKeyDictionary()
)


def check_writes(cache: Any, name: str) -> None:
    """Change the class of `cache` to a subclass that checks each write first.

    `isinstance` stays true for the old class.
    """
    kind: Any = type(cache)
    cache.__class__ = _checked(kind, name)


def check_together(caches: Sequence[Any]) -> None:
    """Let checked caches of one kind compare a first write with each other's arrays."""
    kinds: dict[Any, list[weakref.ref[Any]]] = {}
    for cache in caches:
        slots = len(cache.cache) if isinstance(cache, ArraysCache) else 0
        kinds.setdefault((type(cache), slots), []).append(weakref.ref(cache))
    for same in kinds.values():
        for one in same:
            _peers[one()] = same


@functools.cache
def _checked(kind: Any, name: str) -> type:
    """Return a subclass of `kind` that checks writes, and else does the same."""
    body: dict[str, Any] = {"__slots__": ()}
    for method, check in _CHECKS.items():
        if hasattr(kind, method):
            body[method] = _checking(getattr(kind, method), check)
    return type(name, (kind,), body)


def _checking(write: Callable[..., Any], check: Callable[..., None]) -> Any:
    @functools.wraps(write)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self, *args, **kwargs)
        return write(self, *args, **kwargs)

    return checked


def _check_rows(cache: Any, keys: mx.array, values: mx.array) -> None:
    """Check keys and values [batch, heads, rows, dim]."""
    for name, array in (("keys", keys), ("values", values)):
        _check(cache, name, array, _attribute(name), width=True)
        _check_rank(cache, name, array, "[batch, heads, rows, dim]")
    if keys.shape[:3] != values.shape[:3]:
        raise InvalidRequestError(
            f"Keys of shape {keys.shape} and values of shape {values.shape} were "
            f"written to a {_name(cache)}. Batch, heads and rows must be the same."
        )


def _check_window(cache: Any, kv: mx.array) -> None:
    """Check kv [batch, rows, dim]."""
    _check(cache, "window", kv, _attribute("window"), width=True)
    _check_rank(cache, "window", kv, "[batch, rows, dim]")


def _check_slot(cache: Any, idx: int, value: Any) -> None:
    if isinstance(value, mx.array):
        _check(cache, f"slot {idx}", value, lambda one: one[idx])


def _check_attribute(cache: Any, name: str, value: Any) -> None:
    before = vars(cache).get(name)
    if isinstance(value, mx.array) and isinstance(before, mx.array):
        _check(cache, name, value, _attribute(name))


_CHECKS: dict[str, Callable[..., None]] = {
    "update_and_fetch": _check_rows,
    "update_window": _check_window,
    "__setitem__": _check_slot,
    "__setattr__": _check_attribute,
}


def _check_rank(cache: Any, what: str, array: mx.array, axes: str) -> None:
    rank = axes.count(",") + 1
    if array.ndim != rank:
        raise InvalidRequestError(
            f"An array of shape {array.shape} was written to the {what} of a "
            f"{_name(cache)}, which take rank {rank}. Pass {axes}."
        )


def _attribute(name: str) -> Read:
    return lambda cache: getattr(cache, name, None)


def _held(cache: Any, read: Read) -> tuple[mx.array | None, bool]:
    """Return the array that `read` finds in a cache, and whether it is packed.

    Of a packed array this is the last part, which has the dtype that was written.
    """
    buffer = read(cache)
    packed = isinstance(buffer, (list, tuple)) and bool(buffer)
    buffer = buffer[-1] if packed else buffer
    return (buffer if isinstance(buffer, mx.array) else None), packed


def _check(
    cache: Any, what: str, new: mx.array, read: Read, *, width: bool = False
) -> None:
    """Refuse `new` if it does not fit the array here or in a cache of the same kind."""
    buffer, packed = _held(cache, read)
    if buffer is not None:
        width = width and not packed
        if _form(new, width) != _form(buffer, width) or _converts(new, buffer):
            raise InvalidRequestError(
                f"An array of shape {new.shape}, {_dtype(new)}, was written to the "
                f"{what} of a {_name(cache)}, {buffer.shape}, {_dtype(buffer)}. Rank, "
                "batch, head count, width and dtype have to stay. Use each model and "
                "each batch with caches of its own."
            )
        return
    for other in _arrays(list(vars(cache).values())):
        if other.shape[:1] != new.shape[:1]:
            raise InvalidRequestError(
                f"An array of shape {new.shape} was written to the {what} of a "
                f"{_name(cache)} that holds another of shape {other.shape}. Axis 0 is "
                "the batch and has to be the same in all. Use each batch with caches "
                "of its own."
            )
    _check_peers(cache, what, new, read)


def _check_peers(cache: Any, what: str, new: mx.array, read: Read) -> None:
    """Refuse a first write whose batch or dtype differs from other layers."""
    for peer in _peers.get(cache, ()):
        other = peer()
        others = None if other is None else _held(other, read)[0]
        if others is None:
            continue
        if new.shape[:1] != others.shape[:1] or _converts(new, others):
            raise InvalidRequestError(
                f"An array of shape {new.shape}, {_dtype(new)}, was written to the "
                f"{what} of an empty {_name(cache)}, and another layer holds "
                f"{others.shape}, {_dtype(others)}. Batch and dtype have to be those "
                "of the other layers. Load the model in one dtype."
            )
        return


def _form(array: mx.array, width: bool) -> tuple[int, ...]:
    """Return the parts of a shape that no write may change."""
    heads = array.shape[1:2] if array.ndim == 4 else ()
    return (array.ndim, *array.shape[:1], *heads, *(array.shape[-1:] if width else ()))


def _converts(new: mx.array, old: mx.array) -> bool:
    """Return whether a write converts the dtype; integer dtypes count as one."""
    if new.dtype == old.dtype:
        return False
    return not all(mx.issubdtype(a.dtype, mx.integer) for a in (new, old))


def _arrays(value: Any) -> Iterator[mx.array]:
    if isinstance(value, mx.array) and value.ndim:
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _arrays(item)


def _dtype(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def _name(cache: Any) -> str:
    return type(cache).__name__
