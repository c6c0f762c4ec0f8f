"""Draft lengths and sources of rounds: fixed, or by one rule.

    base                        the protocol of a policy, and its plan
    rule                        the most expected tokens for their time
    ruled, batched              the rule for a stream, and for a batch
    policy_factory              makes the policy of each
    costs, acceptance           seconds of rounds, and how often tokens were accepted
    calibration, cost_store     where costs come from and stay

A policy calls no model and sees no token. The drafter of several sources asks the
policy which of them drafts.
"""
