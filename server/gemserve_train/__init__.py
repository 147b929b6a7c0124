"""Trains adapters, makes them of prefixes, and measures them."""
