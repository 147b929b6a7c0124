"""Adapters: what is trained for a task and put on the model for one request."""
