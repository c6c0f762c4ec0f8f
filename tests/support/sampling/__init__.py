"""Exact probabilities by enumeration, shared noise, and scripted rows."""
