"""From logits to tokens: sampling, acceptance and keyed randomness."""
