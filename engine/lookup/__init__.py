"""The prompt-lookup drafter: what followed the same tokens before.

`index` has the protocol of an index; there is one of n-grams and one of all substrings.
Token ids alone are known here: no model and no probabilities.
"""
