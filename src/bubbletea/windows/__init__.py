"""When each worker of a training job is idle, and the bandwidth that training leaves."""
