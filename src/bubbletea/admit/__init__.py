"""Admission: place a prompt's prefill in the bubbles of one datacenter, or say at once when it would fit.

    from bubbletea.admit.decide import admit, advance, cancel, complete, late, reforecast
    from bubbletea.admit.state import State

    state = State(forecast, costs, lanes)          what is promised so far; explicit, and the only thing that changes
    admit(state, request, now_ns)                  Placement, None (offline: in the backlog) or Refusal
    advance(state, now_ns)                         pour offline work into what is left
    cancel(state, request_id, now_ns)              release what has not begun
    late(state, request_id, token, now_ns)         it got no further than `token`: place the rest anew
    complete(state, request_id, now_ns)            its KV was delivered: its blocks may be reused
    reforecast(state, now_ns)                      the windows have moved: place anew what has not begun

All but `admit` return the Placements that changed, each of which replaces the earlier one of its request. No clock, no
randomness, no threads: the simulator and the service call the same functions and get the same answers.
"""
