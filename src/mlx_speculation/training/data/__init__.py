"""The texts of a training: prompts, the target's answers, and rows cut from them.

    prompts       a file of prompts, each as messages
    own_prompts   prompts that the target writes itself
    answers       answers that the target writes in batches, as token ids
    dialogues     the file of token ids, which a later run extends
    collect       fills the file of dialogues
    row_batches   rows of one shape, in an order determined by a seed
    draft_ids     the token ids that a draft needs most

These modules do not depend on drafters or optimizers.
"""
