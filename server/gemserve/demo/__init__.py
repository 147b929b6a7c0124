"""`make demo`: a fact hidden in a long document, asked for with and without a filter."""
