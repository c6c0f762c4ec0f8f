"""One round: draft, verify, accept, commit.

Read `decoder` (prefill, plan, run), `round` (plain step or drafted round), `verify`
(the target's forward and the decisions on its rows) and `outcome` (what the round
brought). Text, requests and the way drafts are made are not known here.
"""
