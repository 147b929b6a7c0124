"""The sections of `gpu.py`: each one file, run by `worker`, in the order of `plan.SECTIONS`."""
