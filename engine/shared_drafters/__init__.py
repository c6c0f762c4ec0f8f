"""Drafters of many requests at once: one forward drafts a token of each.

`shared` has the base class. `shared_model` is a draft model, whose caches hold all
requests at one lag, `shared_head` a head, a drafter of blocks or an assistant, at the
true position of each request. A kind without such a form drafts for each request in
its turn, with the drafter of `engine.drafters` that it has alone.
"""
