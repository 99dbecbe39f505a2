"""Evidence of a run in the form of CCL-Bench (arXiv 2605.06544): a folder with a workload card, one trace per rank and
the launch files. Writes such folders from Timelines, reads them and bare Kineto folders, and computes metrics.

Loads no torch. Traces are read as a stream, one rank at a time.
"""
