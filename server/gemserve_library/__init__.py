"""Libraries: collections of files that are answered from, with no other model than the one that
answers.

Each segment of a file is read once by the filter layers, which leaves the keys of the heads that
find facts. A question is compared with all of them, and by its words; the best segments become the
documents of an ordinary request.
"""
