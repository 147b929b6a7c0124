"""Several processes, called ranks, that run one model together: see `docs/ranks.md`."""
