"""Helpers of several tests: tiny models."""
