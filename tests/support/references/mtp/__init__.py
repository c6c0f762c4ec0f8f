"""References for the MTP heads of all families."""
