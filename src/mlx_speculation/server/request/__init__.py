"""Requests in one form for all APIs.

    request         `GenerationRequest`: a chat or prompts, and how the text is wanted
    models          bodies as JSON within limits and as pydantic models; their errors
    options         sampling, ends, schema and draft, as pydantic fields
    content         the blocks of messages in all APIs, as pydantic models
    transcript      messages of a chat in one form, put in order
    tools           tools and which of them have to be called
    images          data URLs and files to pictures, within limits
    fetch_image     the bytes behind a URL, where fetching is switched on

Connections, threads, models and chat templates are not known here, and no API's events.
"""

from mlx_speculation.server.request.images import opened
from mlx_speculation.server.request.models import as_invalid, parsed
from mlx_speculation.server.request.request import Chat, GenerationRequest
from mlx_speculation.server.request.transcript import Conversation

__all__ = [
    "Chat",
    "Conversation",
    "GenerationRequest",
    "as_invalid",
    "opened",
    "parsed",
]
