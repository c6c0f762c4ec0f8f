"""Policies that decide how many tokens each round drafts, and which drafter drafts.

    base              the protocol of a policy, and its plan
    rule              the adaptive rule: expected tokens against seconds
    ruled             the rule for a stream, and for a batch
    policy_factory    makes the policy of a stream or a batch
    costs             sources of drafts, with the seconds of their rounds
    calibration       measurement of costs before they are needed

A policy calls no model and sees no token.
"""
