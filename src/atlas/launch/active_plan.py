"""The plan that a run has at the moment: reduced when hosts are lost, grown when they return (`fewer_hosts`). Reports
each change in one line: which host, why, and the simulated cost.

Knows the members of the run, and asks the user. Does not know workers or messages.
"""

from __future__ import annotations

from collections.abc import Callable

from atlas.errors import AtlasError
from atlas.launch.fewer_hosts import HostPlace, RemainingPlan, trained_on
from atlas.launch.membership import Membership, is_or_are
from atlas.launch.prepared_job import PreparedJob
from atlas.launch.train_options import TrainOptions

Ask = Callable[[str, str], None]
"""Asks the user whether to continue with another plan, given an offer and the names of what is lost; raises if not."""


class ActivePlan:
    """`full`: the plan on all hosts."""

    def __init__(
        self, full: PreparedJob, membership: Membership, options: TrainOptions, say: Callable[[str], None], ask: Ask
    ) -> None:
        self.full, self.membership, self.options = full, membership, options
        self._say, self._ask = say, ask
        self._computed: dict[object, RemainingPlan] = {}
        self.prepared = self._without(membership.lost).prepared

    def lose(self, places: frozenset[HostPlace]) -> None:
        """Continue without these hosts. Raises if that is impossible, or the user does not agree."""
        before, new = self.prepared, self._without(self.membership.lost | places)
        who = self.membership.in_words(places)
        reason = "" if who.startswith("datacenter") else f": out of reach for {self.options.grace_s:g} s"
        offer = (
            f"{who} {is_or_are(who)} lost{reason}. {new.what}, {new.prepared.predicted_s:.3g} s an iteration "
            f"instead of {before.predicted_s:.3g} s (simulated)"
        )
        if new.asks:
            self._ask(offer, who)
        else:
            self._say(f"{offer}; from the last checkpoint that survived")
        self.prepared = new.prepared
        with self.membership.rendezvous.changed:
            self.membership.close_places(new.lost)

    def could_grow(self) -> bool:
        """Whether a launcher waits with which the run would be faster; called while it runs."""
        return self._grown() is not None

    def grow(self, num_done: int) -> None:
        """Take back hosts that wait; all workers have stopped, with a checkpoint."""
        new, before = self._grown(), self.prepared
        if new is None:
            return  # it has left again
        who = self.membership.in_words(self.membership.lost - new.lost)
        self._say(
            f"{who} {is_or_are(who)} back: {new.what[0].lower()}{new.what[1:]}, "
            f"{new.prepared.predicted_s:.3g} s an iteration instead of {before.predicted_s:.3g} s (simulated), from "
            f"the checkpoint of step {num_done}"
        )
        self.prepared = new.prepared
        self.membership.readmit(new.lost)

    def _grown(self) -> RemainingPlan | None:
        """What would be trained with the hosts that wait, if it is faster."""
        back = self.membership.could_fill()
        if not back:
            return None
        try:
            new = self._without(self.membership.lost - back)
        except AtlasError:
            return None
        return new if new.prepared.predicted_s < self.prepared.predicted_s else None

    def _without(self, lost: frozenset[HostPlace]) -> RemainingPlan:
        """Computed once: the planner may take seconds, and a host may wait for long."""
        key = (lost, tuple(sorted(self.membership.num_hosts.items())))
        if key not in self._computed:
            self._computed[key] = trained_on(self.full, self.membership.num_hosts, lost, self.options)
        return self._computed[key]
