"""One round of one request or of many: draft, verify, accept, commit.

Read in this order; the steps 1 to 8 of a round are numbered in comments:

    request      one request, and the requests that share a lane
    decoder      the control: plans (1), proposals, verification or step, feedback
    round        a plain step, or a draft (2) and its verification (3, 6, 7, 8)
    forced       drafts of tokens that a constraint forces
    verify       the target's forwards (4), and the decisions on their rows (5)
    outcome      the tokens that a round emits for each request

Then, as needed, `prefill` (before the first round), `final_caches` (after the last),
`sequential` (rows decided one by one), `tree_round` (drafts that are trees) and
`warmup` (shapes compiled in advance). This package knows neither text nor how drafters
make their drafts.
"""
