"""What a WAN path does over time: recorded packets, a model learnt from them, new weather drawn from it.

    packets -> fit -> PathModel (a `.path` file) -> draw -> rows of a link's trace

Knows no jobs, no links and no sockets. numpy only.
"""
