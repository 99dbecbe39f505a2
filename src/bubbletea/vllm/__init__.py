"""A connector for an unmodified vLLM server, which then decodes prompts that BubbleTea has prefilled (docs/vllm.md).

Everything here runs inside vLLM's processes: standard library, torch, and those parts of bubbletea that need no more.
Only `connector` and `metrics` import vllm.
"""
