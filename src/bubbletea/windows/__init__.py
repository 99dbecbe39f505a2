"""When each worker of a training job is idle, and what its network has to spare."""
