"""One round of one request or of many: draft, verify, accept, commit.

Read in this order; the steps 1 to 8 of a round are numbered in comments:

    request      requests, each put together once, and those that share a lane
    decoder      of one: the plan before each round (1), and what is learnt from it
    round        a plain step, or a draft (2) and its verification (3, 6, 7, 8)
    forced       drafts that a constraint leaves no choice of
    verify       the target's forwards (4), and the decisions on their rows (5)
    outcome      what a round brought to each request

and, where it is of interest, `prefill` for what comes before the first round and
`final_caches` for what comes after the last, and `sequential` for rows that are
decided one by one. The rounds of many are planned in `engine.batch.running`. Text and
the way drafts are made are not known here.
"""
