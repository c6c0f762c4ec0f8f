"""Records texts with their drafts, and replays draft length policies on them."""
