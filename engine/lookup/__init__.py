"""The prompt-lookup drafter: the tokens that followed the same tokens before.

    drafter     the draft that a user passes, and its drafter of one stream
    lookup      the longest match over all places
    places      growing indexes, and where the end of a text occurs in them
    history     answers of earlier requests, indexes of finished texts
    survival    the chance that looked-up tokens are right, learnt by bucket
    automaton   an index of all substrings

Token ids alone are known here: no model and no probabilities.
"""
