"""Typed client of gemserve over the official `openai` SDK."""
