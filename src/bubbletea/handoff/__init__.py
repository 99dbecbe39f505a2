"""A finished prefill's keys and values on their way to whoever decodes."""
