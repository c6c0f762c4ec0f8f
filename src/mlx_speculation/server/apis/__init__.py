"""Faces: what each API takes and sends, over one internal request and its events.

    base          the protocol of a face, the end of a text, server-sent events
    chat_completions    Chat Completions: chunks, log-probabilities
    chat_request        bodies of Chat Completions
    completions   legacy completions
    messages      the Messages API: blocks, pings
    messages_request    its bodies, and what coding agents put into them
    responses     the Responses API: items, sequence numbers
    responses_request   its bodies; function, custom and namespace tools
    usage         what a text has cost, in OpenAI's form

A wrong body raises an `ApiError` that names its field. Sockets, threads and models are
not known here.
"""
