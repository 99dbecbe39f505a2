"""The live page of a run: follows the files that a run writes, serves a page on loopback, answers what-if questions.

Runs in a process of its own, so that neither clients nor searches slow training. Knows run folders, jobs and the
planner; not workers and sockets of training.
"""
