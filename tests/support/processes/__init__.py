"""Helpers for tests with ranks, servers, commands, interrupts and other processes."""
