"""Scripted and broken drafters, scripted draft lengths, benches of heads."""
