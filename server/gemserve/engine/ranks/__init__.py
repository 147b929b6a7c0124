"""Several processes, called ranks, that run one model: see `docs/several-machines.md`."""
