"""The prompt-lookup drafter: proposes tokens that followed the same tokens before.

    drafter     the draft that a user passes, and its drafter of one stream
    lookup      the places to search, and the longest match over all of them
    survival    the probability that drafted tokens are accepted, learnt from drafts
    automaton   an index of all substrings

A lookup reads only token ids: it runs no model and sees no logits.
"""
