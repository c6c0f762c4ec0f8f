"""Faces: a class for each API, which reads its requests and formats the answers.

    base          `Face`, and `BlockFace` for answers that are lists of blocks
    openai        legacy completions, and what Chat Completions share with them
    chat_completions    Chat Completions: messages in and out
    messages      the Messages API: bodies, blocks, pings
    responses     the Responses API: items in and out, sequence numbers

An invalid body raises an `ApiError` that names the field. These modules do not depend
on sockets, threads or models.
"""
