"""Decoders that can be cut into stages: one flexible block, Hugging Face configs and weights, tensor parallelism,
prefill with KV. Import from the modules; start at `config` (what a model is) and `decoder` (a run of its layers).
"""
