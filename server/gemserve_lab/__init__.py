"""Measures filters: tasks, runs, reports, and the demonstration."""
