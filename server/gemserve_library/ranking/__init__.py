"""`/rerank` and `/score`: which documents a query looks at most."""
