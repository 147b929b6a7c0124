"""The libraries of clients: whose each is, and the files that are being read into it."""
