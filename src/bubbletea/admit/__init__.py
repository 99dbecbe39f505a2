"""Admission: place a prompt's prefill in the bubbles of one datacenter, or return at once when it would fit.

    from bubbletea.admit.decide import admit, advance, cancel, complete, late, reforecast
    from bubbletea.admit.state import AdmissionState

    state = AdmissionState(forecast, costs, lanes) all placements so far; the only thing that changes
    admit(state, request, now_ns)                  Placement, None (offline: in the backlog) or Refusal
    advance(state, now_ns)                         place offline requests in the remaining windows
    cancel(state, request_id, now_ns)              release the part that has not started
    late(state, request_id, token, now_ns)         it got only as far as `token`: place the rest again
    complete(state, request_id, now_ns)            its KV was delivered: later requests may reuse its blocks
    reforecast(state, now_ns)                      the windows have changed: place again what has not started

All but `admit` return the changed Placements; each replaces the earlier one of its request. No clock, no randomness, no
threads: the simulator and the service call the same functions and get the same results.
"""
