"""One round: draft, verify, accept, commit.

Read in this order:

    request      what a generation runs its rounds with, put together once
    decoder      prefill; before each round the plan, after it what is learnt from it
    round        the round itself: a plain step, or a draft and its verification
    verify       the target's forwards, and the decisions on their rows
    outcome      what a round brought, for one request and for each row of a batch
    sequential   rows decided one by one, for processors that demand it

The steps 1 to 8 are numbered in comments in `decoder`, `round` and `verify`. Text and
the way drafts are made are not known here.
"""
