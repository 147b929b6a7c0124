"""`gemserve demo`: a question about a fact hidden in a long document, with and without a filter."""
