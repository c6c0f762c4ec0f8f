"""Generation: rounds of drafting and verifying, draft lengths and statistics."""
