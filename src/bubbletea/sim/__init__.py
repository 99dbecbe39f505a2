"""BubbleTea simulated: windows of a simulated training job, requests from a trace, and the service's admission. `scene`
prepares a job, `replay` replays a trace, `rivals` has the policy of the paper, `noise` measures how an imperfect
forecast slows training, `command` is `bubbletea simulate`."""
