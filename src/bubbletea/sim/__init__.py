"""BubbleTea simulated: the windows of a simulated training job, requests from a trace, the same admission as the
service's. `scene` sets the stage, `replay` plays a trace on it, `rivals` are what ours is compared with, `noise` tells
what an imperfect forecast costs training, `command` is `bubbletea simulate`."""
