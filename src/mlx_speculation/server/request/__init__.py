"""From the bytes of an HTTP request to a checked request.

    json_body       headers and bytes to a JSON object
    fields          a JSON object as typed fields, each taken once
    request         `read_request`: every field checked, unknown ones refused
    options         sampling, ends, log-probabilities, schema and draft of a request
    chat_messages   messages and tools of a chat
    images          data URLs and files to pictures, within limits
    fetch_image     the bytes behind a URL, where fetching is switched on

What is wrong is an error object of OpenAI's interface. Connections, threads and models
are not known here.
"""

from mlx_speculation.server.request.images import opened
from mlx_speculation.server.request.json_body import check_framing, parsed, read_body
from mlx_speculation.server.request.request import CheckedRequest, read_request

__all__ = [
    "CheckedRequest",
    "check_framing",
    "opened",
    "parsed",
    "read_body",
    "read_request",
]
