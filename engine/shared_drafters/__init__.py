"""Drafters shared by many requests: one forward drafts a token for each.

`shared` has the base class. `shared_model` is a draft model, whose caches lag behind
all requests by the same number of tokens. `shared_head` is a head, a block drafter or
an assistant, whose caches may lag differently behind each request. Drafters that cannot
be shared draft for one request after the other, see `engine.drafters`.
"""
