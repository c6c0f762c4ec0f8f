"""How many tokens a round drafts: fixed, or adaptive by measured costs and acceptance.

`base` has the protocol of a policy and its plan, `adaptive` decides by measurement,
`policy_factory` makes the policy of each stream, `costs` has what rounds cost,
`calibration` and `cost_store` where costs come from and stay. A policy calls no drafter
and no model, and sees no token.
"""
