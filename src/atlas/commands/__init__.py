"""The commands of `atlas`, one module each: `configure(parser)` names its options, `run(args)` does it."""
