"""Adapters: small trained changes to the model, applied for one request."""
