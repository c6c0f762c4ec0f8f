"""Programs that tests start with this Python.

They run without torch, like the programs of most users of mlx. transformers imports
torch if torch is installed; this takes longer than the rest of a command's start.
"""

import sys
from pathlib import Path

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"
# The program of the installed command.
MAIN = "from mlx_speculation.cli import main; main()"


def python(code: str, *arguments: str) -> list[str]:
    """Return the command that runs code with these arguments in `sys.argv`."""
    return [sys.executable, "-c", WITHOUT_TORCH + code, *arguments]


def script(file: Path, *arguments: str) -> list[str]:
    begin = "import runpy; del sys.argv[0]; "
    return python(
        f"{begin}runpy.run_path(sys.argv[0], run_name='__main__')",
        str(file),
        *arguments,
    )


def command_line(*options: str) -> list[str]:
    return python(MAIN, *options)
