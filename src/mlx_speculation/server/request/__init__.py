"""Requests in one form for all APIs.

    models          bodies as JSON within limits and as pydantic models; their errors
    options         `GenerationRequest`: a chat or prompts, with their options
    content         the blocks of messages in all APIs, as pydantic models
    transcript      messages of a chat in one form; tool results in the calls' order
    tools           tools and which of them have to be called
    images          pictures of data URLs, files and fetched URLs, within limits

These modules do not depend on connections, threads, models or chat templates.
"""
