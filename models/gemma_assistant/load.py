"""Loading a Gemma 4 assistant: a folder in, a module out."""

from pathlib import Path

from mlx_speculation.models.checkpoints.draft_checkpoint import load_into, read_tensors
from mlx_speculation.models.config_json import read_config
from mlx_speculation.models.gemma_assistant.config import NAME, read_assistant_settings
from mlx_speculation.models.gemma_assistant.network import Assistant

# The output layer is the embedding, which some files hold twice.
_COPIES = ("lm_head.weight",)


def load_assistant(folder: str | Path) -> Assistant:
    """Load the assistant in a folder of its own.

    Returns:
        The assistant; on a Linux CPU in float32, dequantized where it was quantized.

    Raises:
        ModelFolderError: it is none, or not complete.
    """
    folder = Path(folder).expanduser()
    assistant = Assistant(read_assistant_settings(read_config(folder)))
    weights = read_tensors(folder, NAME)
    for copy in _COPIES:
        weights.pop(copy, None)
    load_into(assistant, weights, NAME)
    return assistant
