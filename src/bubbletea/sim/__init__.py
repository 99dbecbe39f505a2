"""BubbleTea simulated: windows of a simulated training job, requests from a trace, and the service's admission.
`simulated_cluster` prepares a job, `replay` replays a trace, `paper_policy` is the policy of the paper, `noise`
measures how an imperfect forecast slows training, `command` is `bubbletea simulate`."""
