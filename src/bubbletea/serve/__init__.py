"""The service: requests in by HTTP, prefill in the bubbles of training, tokens out."""
