"""The prefill itself: a prompt layer by layer and chunk by chunk, inside a training worker's waits."""
