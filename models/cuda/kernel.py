"""CUDA kernels that NVRTC compiles once on a machine.

mlx 0.32 compiles kernels of `mx.fast.cuda_kernel` anew in every process, with its own
headers: 1.7 s a kernel on an H100. A `Kernel` is compiled without headers (0.2 s) and
kept in the cache folder. `mx.fast.precompiled_cuda_kernel` launches it. This function
passes scalars but no strides, so inputs that are not contiguous are copied.
"""

import ctypes
import functools
import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import mlx.core as mx

from mlx_speculation.environment import cache_folder

_DIGEST = 32  # bytes of the sha256 at the start of a kept binary


class Kernel:
    """A kernel that reads contiguous inputs.

    `source` is CUDA C++ without includes, with an `extern "C"` function `name`. The
    function's parameters are the inputs, the outputs, then the scalars.

    Raises:
        RuntimeError: NVRTC is missing, or refuses the source.
    """

    def __init__(self, name: str, source: str) -> None:
        self._name, self._binary = name, binary_of(source)

    def __call__(
        self,
        inputs: Sequence[mx.array],
        scalars: Sequence[int],
        blocks: tuple[int, int, int],
        threads: int,
        output_shapes: Sequence[tuple[int, ...]],
        output_dtype: mx.Dtype,
    ) -> list[mx.array]:
        """Return the lazy outputs; inputs that are not contiguous are copied."""
        width, height, depth = blocks
        outputs: list[mx.array] = mx.fast.precompiled_cuda_kernel(
            name=self._name,
            compiled_source=self._binary,
            inputs=list(inputs),
            output_shapes=list(output_shapes),
            output_dtypes=[output_dtype] * len(output_shapes),
            scalars=list(scalars),
            grid=(width * threads, height, depth),
            threadgroup=(threads, 1, 1),
            ensure_row_contiguous=True,
        )
        return outputs


def binary_of(source: str) -> bytes:
    """Return the machine code of a source for this GPU, if possible from the cache.

    Raises:
        RuntimeError: NVRTC is missing, or refuses the source.
    """
    architecture = str(mx.device_info()["architecture"])
    file = kept_file(source, architecture)
    kept = None if file is None else read_kept(file)
    if kept is None:
        kept = compiled(source, architecture)
        if file is not None:
            keep(file, kept)
    return kept


def kept_file(source: str, architecture: str) -> Path | None:
    """Return the file for the machine code; None: there is no cache folder."""
    folder = cache_folder()
    if folder is None:
        return None
    key = f"{architecture} {source}".encode()
    return folder / "kernels" / f"{hashlib.sha256(key).hexdigest()[:32]}.cubin"


def read_kept(file: Path) -> bytes | None:
    """Return the machine code in a file; None: it is missing or damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, binary = content[:_DIGEST], content[_DIGEST:]
    return binary if hashlib.sha256(binary).digest() == digest else None


def keep(file: Path, binary: bytes) -> None:
    """Write a file atomically; a failure has no effect and raises nothing."""
    temporary = file.with_name(f".{file.name}.{os.urandom(8).hex()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(hashlib.sha256(binary).digest() + binary)
        temporary.replace(file)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def compiled(source: str, architecture: str) -> bytes:
    """Compile a source for an architecture such as "sm_90".

    Raises:
        RuntimeError: NVRTC is missing, or refuses the source.
    """
    library = nvrtc()
    program = ctypes.c_void_p()
    text = source.encode()
    _check(
        library,
        library.nvrtcCreateProgram(
            ctypes.byref(program), text, b"kernel.cu", 0, None, None
        ),
    )
    try:
        options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
        status = library.nvrtcCompileProgram(program, 1, options)
        if status:
            log = _output(library, "ProgramLog", program).decode(errors="replace")
            raise RuntimeError(f"NVRTC refuses a kernel: {log.strip()}")
        return _output(library, "CUBIN", program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def nvrtc() -> ctypes.CDLL:
    """Return the NVRTC that mlx has loaded.

    Raises:
        RuntimeError: mlx has not loaded NVRTC.
    """
    maps = Path("/proc/self/maps").read_text(errors="replace")
    files = {line.split()[-1] for line in maps.splitlines() if "libnvrtc.so" in line}
    if not files:
        raise RuntimeError("mlx has loaded no libnvrtc")
    return ctypes.CDLL(min(files))


def _output(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(
        library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    )
    content = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, content))
    return content.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        text = library.nvrtcGetErrorString
        text.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC failed: {text(status).decode()}")
