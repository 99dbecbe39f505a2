"""The control plane of photonic rails: which circuits change when, the switches that change them, and a rehearsal."""
