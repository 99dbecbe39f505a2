"""Who is in a run: which launcher has which place (host k of a datacenter), which places are lost, and who waits for a
place: spares, and hosts that came back after the run went on without them.

Knows launchers, connections and the file that a coordinator leaves (`run_state`). Does not know what is trained, or
what a lost host costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from atlas.errors import StartAgainError
from atlas.launch.fewer_hosts import HostPlace
from atlas.launch.prepared_job import difference
from atlas.launch.rendezvous import AgentName, JoinedAgent, Rendezvous
from atlas.launch.run_state import StateFile
from atlas.launch.train_options import TrainOptions

GONE_S = 2.0
"""Where a spare waits, a host out of reach for this long is replaced. A launcher that lost only its connection is back
within `rendezvous.RETRY_S`."""
POLL_S = 0.2
"""How long a wait for launchers goes on without a check."""
REMIND_S = 10.0
"""Between two lines that say which launchers are missing."""


class LostHostsError(Exception):
    """These hosts did not come back in time."""

    def __init__(self, places: Sequence[HostPlace]) -> None:
        super().__init__(places)
        self.places = frozenset(places)


def is_or_are(places: str) -> str:
    """The verb after the words of `Membership.in_words`."""
    return "are" if " and " in places or ", " in places else "is"


class Membership:
    """`plan`: the digest that all launchers must have."""

    def __init__(
        self, datacenters: Sequence[str], plan: str, file: StateFile, options: TrainOptions, say: Callable[[str], None]
    ) -> None:
        self.datacenters, self._plan, self._file, self._options, self._say = datacenters, plan, file, options, say
        self.num_hosts: dict[str, int] = dict(file.state.num_hosts)
        """By datacenter, lost ones included."""
        self._before = frozenset(self.num_hosts)
        """Datacenters that an earlier coordinator knew: their launchers are running, or were."""
        self.lost = frozenset(file.state.lost)
        self._began = time.monotonic()
        self._rendezvous: Rendezvous | None = None

    @property
    def rendezvous(self) -> Rendezvous:
        assert self._rendezvous is not None, "`use` comes first"
        return self._rendezvous

    def use(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        rendezvous.closed = self.lost

    def why_not(self, agent: AgentName, plan: str) -> str | None:
        """Why a launcher may not join; None: it may."""
        if agent.datacenter not in self.datacenters:
            return f"the plan has no datacenter of this name; it has {', '.join(self.datacenters)}"
        if (why := difference(plan, self._plan)) is not None:
            return why
        if not (agent.is_spare or 0 <= agent.part < agent.num_parts):
            return f"its number (from 0) is {agent.part}, and must be below {agent.num_parts}"
        return None

    @property
    def members(self) -> list[str]:
        """Datacenters with a host in the run; those without a worker keep copies of checkpoints."""
        lost = [dc for dc, _ in self.lost]
        return [dc for dc in self.datacenters if lost.count(dc) < self.num_hosts.get(dc, 1)]

    def name(self, place: HostPlace) -> AgentName:
        return AgentName(*place, self.num_hosts.get(place[0], 1))

    def in_words(self, places: frozenset[HostPlace]) -> str:
        """`datacenter west`, if all of it is lost, or `host east/1`."""
        words = []
        for dc in dict.fromkeys(dc for dc, _ in sorted(places)):
            mine = sorted(place for place in places if place[0] == dc)
            is_whole = len(mine) == self.num_hosts.get(dc, 1)
            words.append(f"datacenter {dc}" if is_whole else ", ".join(f"host {self.name(place)}" for place in mine))
        return " and ".join(words)

    # ---- waiting for launchers -------------------------------------------------------------------------------------
    def gather(self, check: Callable[[], None], predicted_s: float) -> list[JoinedAgent]:
        """Wait until a launcher is at every place of the run. Raises LostHostsError if one does not come back in
        time. `check` is called again and again and may raise."""
        began = time.monotonic()
        deadline, remind = began + self._options.gather_s, began + REMIND_S
        with self.rendezvous.changed:
            while True:
                check()
                self._learn()
                self._use_spares(began, predicted_s)
                missing = self._missing()
                if not missing:
                    self._end_leftovers()
                    return [agent for place, agent in self.rendezvous.agents.items() if place not in self.lost]
                now = time.monotonic()
                gone = [place for place, since in missing.items() if since and now - since > self._options.grace_s]
                if gone:
                    raise LostHostsError(gone)
                if now > deadline:
                    break
                if now > remind:
                    remind += REMIND_S
                    self._say(f"waiting for {self._missing_in_words(missing)} at {self._address}")
                self.rendezvous.changed.wait(POLL_S)
        raise StartAgainError(
            f"{self._missing_in_words(missing)} did not connect to {self._address} within {self._options.gather_s:g} "
            "s. Start `atlas train PLAN --dc NAME` there, or leave it out with --without"
        )

    def _end_leftovers(self) -> None:
        """Launchers without a place that joined in the middle of an attempt have workers of it."""
        for agent in self.rendezvous.waiting.values():
            if agent.epoch:
                agent.channel.send({"epoch": agent.epoch, "end": True})
                agent.epoch = 0

    def rejoined(self, instances: Mapping[str, int], epoch: int) -> list[JoinedAgent] | None:
        """Wait for the launchers of a running attempt to connect again; None if one has left it, or does not come."""
        deadline = time.monotonic() + self._options.grace_s
        with self.rendezvous.changed:
            while time.monotonic() < deadline:
                back = {agent.instance: agent for agent in self.rendezvous.everyone}
                places = {name.node: name for name in map(self.name, self._places())}
                if not instances.keys() <= places.keys():
                    return None
                known = {places[node]: back[number] for node, number in instances.items() if number in back}
                others = [a for a in self.rendezvous.agents.values() if a.instance not in instances.values()]
                if others or any(agent.epoch != epoch for agent in known.values()):
                    return None
                if len(known) == len(instances):
                    for name, agent in known.items():
                        self.rendezvous.put(agent, name)
                    return list(known.values())
                self.rendezvous.changed.wait(POLL_S)
        return None

    def grace_s(self, agent: JoinedAgent) -> float:
        """How long a launcher of a running attempt may be out of reach."""
        return GONE_S if self.rendezvous.waiting_in(agent.name.datacenter) else self._options.grace_s

    def _places(self) -> list[HostPlace]:
        places = [(dc, part) for dc in self.datacenters for part in range(self.num_hosts.get(dc, 1))]
        return [place for place in places if place not in self.lost]

    def _missing(self) -> dict[HostPlace, float]:
        """Places without a connected launcher, and since when; 0 where none has connected yet."""
        missing: dict[HostPlace, float] = {}
        for place in self._places():
            agent = self.rendezvous.agents.get(place)
            if agent is None:
                missing[place] = self._began if place[0] in self._before else 0.0
            elif not agent.channel.is_connected:
                missing[place] = agent.channel.gone_since
        return missing

    def _learn(self) -> None:
        """How many hosts each datacenter has, as its launchers report."""
        reported = {a.home.datacenter: a.home.num_parts for a in self.rendezvous.everyone if not a.home.is_spare}
        changed = {dc for dc, count in reported.items() if self.num_hosts.get(dc, count) != count}
        if reported.items() <= self.num_hosts.items():
            return
        self.num_hosts |= reported
        self.close_places(frozenset(place for place in self.lost if place[0] not in changed))

    def close_places(self, lost: frozenset[HostPlace]) -> None:
        """The run does without these. Launchers there wait; they end workers of the last attempt."""
        self.lost = self.rendezvous.closed = lost
        for place in [place for place in self.rendezvous.agents if place in lost]:
            agent = self.rendezvous.agents.pop(place)
            agent.name = agent.home
            self.rendezvous.waiting[agent.instance] = agent
        self._file.update(num_hosts=dict(self.num_hosts), lost=tuple(sorted(lost)))

    # ---- spares and hosts that came back ---------------------------------------------------------------------------
    def _use_spares(self, began: float, predicted_s: float) -> None:
        for place, since in self._missing().items():
            gone_s = time.monotonic() - (since or began)
            if gone_s < (GONE_S if since else self._options.grace_s):
                continue
            agent = self._waiting_for(place)
            if agent is not None:
                self.rendezvous.put(agent, self.name(place))
                self._say(
                    f"host {self.name(place)} is lost: out of reach for {gone_s:.0f} s. A spare takes its place: "
                    f"{predicted_s:.3g} s an iteration, as before (simulated)"
                )

    def _waiting_for(self, place: HostPlace) -> JoinedAgent | None:
        """The launcher that had this place before, if it waits; or a spare."""
        found = self.rendezvous.waiting_in(place[0])
        return min(found, key=lambda agent: agent.home.place != place, default=None)

    def could_fill(self) -> frozenset[HostPlace]:
        """Lost places for which a launcher waits."""
        found: list[HostPlace] = []
        for dc in self.datacenters:
            waiting = self.rendezvous.waiting_in(dc)
            homes = {agent.home.place for agent in waiting}
            mine = sorted((place for place in self.lost if place[0] == dc), key=lambda place: place not in homes)
            found += mine[: len(waiting)]
        return frozenset(found)

    def readmit(self, lost: frozenset[HostPlace]) -> None:
        """Give places that are no longer lost to launchers that wait."""
        back = self.lost - lost
        with self.rendezvous.changed:
            self.close_places(lost)
            for place in sorted(back):
                agent = self._waiting_for(place)
                if agent is not None:
                    self.rendezvous.put(agent, self.name(place))

    def _missing_in_words(self, missing: Mapping[HostPlace, float]) -> str:
        whole = [dc for dc in self.datacenters if all(p in missing for p in self._places() if p[0] == dc)]
        words = [dc for dc in whole if any(place[0] == dc for place in missing)]
        return ", ".join([*words, *(str(self.name(place)) for place in missing if place[0] not in whole)])

    @property
    def _address(self) -> str:
        host, port = self.rendezvous.address
        return f"{host}:{port}"
