"""Checkpoints: written in the background by each worker, layer by layer, and resumed by any plan.

docs/checkpoints.md describes the format and the order of events. Nothing here is a pickle.
"""
