"""Reads the text of files: plain text in any encoding, PDF, and other formats."""
