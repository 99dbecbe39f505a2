"""Prefill inside a training worker's waits: a prompt layer by layer and chunk by chunk."""
