"""Small files in which findings are kept from one process to the next.

They stand under `cache_folder`. What is in them may be lost at any time.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write a file as a whole, and make its folder.

    Raises:
        OSError: it cannot be written; everything is as it was.
    """
    temporary = file.with_name(f".{file.name}.{os.urandom(8).hex()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("x", encoding="utf-8") as opened:
            opened.write(json.dumps(value, indent=2) + "\n")
            opened.flush()
            os.fsync(opened.fileno())
        temporary.replace(file)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
