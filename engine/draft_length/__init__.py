"""How many tokens a round drafts: fixed, or adaptive by measured costs and acceptance.

    base                        the protocol of a policy, and its plan
    adaptive                    one costly source, and batches: by position
    rule, ruled                 free sources and several: the most tokens for their time
    policy_factory              makes the policy of each stream
    costs, acceptance           seconds of rounds, and how often tokens were accepted
    calibration, cost_store     where costs come from and stay

A policy calls no drafter and no model, and sees no token. In `ruled` a drafter of
several asks it which of them drafts.
"""
