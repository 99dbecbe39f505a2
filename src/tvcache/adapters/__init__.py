"""The cache under other libraries' tools: plain functions (`functions`), SkyRL-gym (`skyrl`), verl (`verl`)."""
