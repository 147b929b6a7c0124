"""Scripts that measure, by what they measure. Each runs by its path, from any folder:

    python benchmarks/ttft.py
    python benchmarks/speed/step.py

Python puts only a script's own folder on the path. So a script that imports from here begins with
one line that puts the repository root there, and everything is imported as `benchmarks.ROOM.NAME`.
"""
