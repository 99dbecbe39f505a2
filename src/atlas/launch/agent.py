"""One datacenter's side of a run, or one host's of it: starts its workers when it is told to, passes on what they hear
and say, keeps checkpoints, and ends everything when told to, or when the rendezvous is gone.

    <- {"life": epoch}             -> {"begun": {host, keeper, shelves}} a new life: whatever was left is ended first
    <- {"keepers": {node: place}, "shelves": {node: names}}  -> {"met": true}
    <- {"choose": true}            -> {"chosen": {save, next}}            what to resume from; the next attempt
    <- {"prepare": {...}}          -> {"prepared": pids}                its workers run, and have their assignments
    <- {"admit": {node: place}}    -> {"admitted": true}                workers that copy their checkpoints to here
    <- {"tell": name, "message"}      to a worker; -> {"said": name, "message"} of one
    <- {"end": true}                  ends the workers
    <- {"finish": {text, code}}       and the launcher
                                   -> {"interrupt": true}               somebody pressed Ctrl-C here
                                   -> {"error": "...", "mend": bool}

Knows its own hosts, folders and devices; decides nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from atlas.errors import AtlasError, WorkerError
from atlas.ir.parse import from_text
from atlas.launch.checkpoint_exchange import CheckpointExchange
from atlas.launch.control_channel import Message
from atlas.launch.preflight import devices_for, layers_of, require_room
from atlas.launch.rendezvous import AgentName, RendezvousClient
from atlas.launch.worker_processes import WorkerProcesses
from atlas.runtime.assignment import SHIPPED, Assignment, SaveChoice, TrainingSetup, read
from atlas.runtime.wiring import WorkerRole
from atlas.wan.security.credentials import Security
from atlas.wan.transport.base import Address

LISTEN_S = 0.2


@dataclass(frozen=True)
class AgentSettings:
    """What differs from datacenter to datacenter, and what nobody else needs to know."""

    name: AgentName
    host: str = "127.0.0.1"
    """The address that its workers and its keeper listen on, and that the others reach them at."""
    certificates: Path | None = None
    trusted_networks: tuple[str, ...] = ()
    checkpoints: Path | None = None
    data: str = ""
    """This datacenter's shards; the others' lie elsewhere."""
    weights: str = ""
    device: str = "cuda"
    local_rank: int | None = None
    """Of the first worker on this host, as torchrun says; None: 0."""


@dataclass
class _Attempt:
    """What this site has of the life under way."""

    epoch: int
    datacenters: list[str]
    shelves: CheckpointExchange | None = None
    keepers: dict[str, Address] | None = None
    fleet: WorkerProcesses | None = None
    passing: threading.Thread | None = None


class Agent:
    """`run` returns the launcher's exit code."""

    def __init__(
        self, settings: AgentSettings, caller: RendezvousClient, security: Security, say: Callable[[str], None]
    ) -> None:
        self.settings, self._caller, self._security, self._say = settings, caller, security, say
        self._life: _Attempt | None = None
        self._interrupted = False

    def run(self) -> int:
        try:
            while True:
                message = self._next()
                if "gone" in message:
                    raise AtlasError(
                        f"{message['gone']}. This datacenter's workers were ended. Start again when it is back, or "
                        "without it (--without, with --rendezvous somewhere else)"
                    )
                if "finish" in message:
                    return self._finish(message["finish"])
                self._obey(message)
        finally:
            self.close()

    def close(self) -> None:
        self._end()
        self._caller.close()

    def _next(self) -> Message:
        while True:
            try:
                return self._caller.channel.inbox.get()
            except KeyboardInterrupt:
                if self._interrupted:
                    raise
                self._interrupted = True
                self._say("stopping after this step, with a checkpoint; again to stop at once")
                self._caller.channel.send({"interrupt": True})

    def _finish(self, how: Message) -> int:
        self._end()
        if how.get("text"):
            self._say(str(how["text"]))
        return int(how["code"])

    # ---- orders ----------------------------------------------------------------------------------------------------
    def _obey(self, message: Message) -> None:
        orders: dict[str, Callable[[Message], None]] = {
            "life": self._begin,
            "keepers": self._meet,
            "choose": self._choose,
            "prepare": self._prepare,
            "admit": self._admit,
            "tell": self._tell,
            "end": lambda _: self._end(),
        }
        if "life" not in message and (self._life is None or message["epoch"] != self._life.epoch):
            return  # of a life that has ended
        order = next(key for key in orders if key in message)
        try:
            orders[order](message)
        except AtlasError as error:
            self._answer({"error": str(error), "mend": not isinstance(error, WorkerError)})
        except OSError as error:
            where = error.filename or self.settings.host
            self._answer({"error": f"{where}: {error.strerror or error}. Fix it and start again", "mend": True})

    def _answer(self, message: Message) -> None:
        assert self._life is not None
        self._caller.channel.send({"epoch": self._life.epoch, **message})

    def _begin(self, message: Message) -> None:
        self._end()
        life = self._life = _Attempt(int(message["life"]), list(message["datacenters"]))
        mine = self.settings
        if mine.checkpoints is None:
            self._answer({"begun": {"host": mine.host, "keeper": None, "shelves": []}})
            return
        if mine.checkpoints.exists() and not mine.checkpoints.is_dir():
            raise AtlasError(f"{mine.checkpoints}: not a folder. Choose another place for checkpoints")
        life.shelves = CheckpointExchange(
            mine.checkpoints, mine.name, life.datacenters, mine.host, life.epoch, self._security
        )
        there = {"keeper": list(life.shelves.address), "shelves": list(life.shelves.local)}
        self._answer({"begun": {"host": mine.host, **there}})

    def _meet(self, message: Message) -> None:
        life = self._now()
        life.keepers = {node: (place[0], place[1]) for node, place in message["keepers"].items()}
        if life.shelves is not None:
            life.shelves.meet(life.keepers, message["shelves"])
        self._answer({"met": True})

    def _choose(self, message: Message) -> None:
        life = self._now()
        chosen, attempt = life.shelves.choose() if life.shelves is not None else (None, 0)
        self._answer({"chosen": {"save": chosen, "next": attempt}})

    def _admit(self, message: Message) -> None:
        life = self._now()
        if life.shelves is not None:
            life.shelves.admit(message["admit"])
        self._answer({"admitted": True})

    def _tell(self, message: Message) -> None:
        life = self._now()
        if life.fleet is not None:
            life.fleet.tell(str(message["tell"]), message["message"])

    def _prepare(self, message: Message) -> None:
        life, wanted = self._now(), message["prepare"]
        training = self._localised(read(TrainingSetup, wanted["training"]))
        program = from_text(wanted["program"])
        roles = [WorkerRole(program, worker, cell, wanted["num_cells"]) for cell, worker in wanted["workers"]]
        mine = self.settings
        devices = devices_for(len(roles), mine.device, mine.name.datacenter, mine.local_rank, tp=wanted["tp"])
        require_room(roles, training, mine.device, tp=wanted["tp"])
        save = self._save_choice(life, wanted, [layer for role in roles for layer in layers_of(role, training)])
        life.fleet = WorkerProcesses("atlas.runtime.process", [role.name for role in roles])
        life.passing = threading.Thread(target=self._pass_on, args=(life, life.fleet), daemon=True, name="ears")
        life.passing.start()
        for role, device in zip(roles, devices, strict=True):
            assignment = Assignment(
                worker=role.worker,
                program=wanted["program"],
                training=training,
                num_steps=wanted["num_steps"] - wanted["first_step"],
                first_step=wanted["first_step"],
                cell=role.cell,
                num_cells=role.num_cells,
                compute_ns=tuple(map(tuple, wanted["compute_ns"].get(role.name, ()))),
                device=device,
                tp=wanted["tp"],
                listen=mine.host,
                streams=wanted["streams"],
                certificates=str(mine.certificates or ""),
                trusted_networks=mine.trusted_networks,
                epoch=life.epoch,
                patience_s=wanted["patience_s"],
                save=save,
            )
            life.fleet.tell(role.name, {"assignment": assignment.to_json()})
        self._answer({"prepared": life.fleet.pids})

    def _localised(self, training: TrainingSetup) -> TrainingSetup:
        """With this datacenter's own folders."""
        data, model, mine = training.data, training.model, self.settings
        if data.folder and data.folder != SHIPPED:
            data = replace(data, folder=mine.data or data.folder)
        if model.weights:
            model = replace(model, weights=mine.weights or model.weights)
        return replace(training, data=data, model=model)

    def _save_choice(self, life: _Attempt, wanted: Message, layers: Sequence[str]) -> SaveChoice | None:
        if life.shelves is None:
            return None
        sources: list[str] = []
        if wanted["resume"] is not None and layers:
            sources = life.shelves.fetch(wanted["resume"], layers)
        peer, copy = wanted["copy_to"], None
        if peer is not None and life.keepers is not None:
            copy = life.shelves.copy_choice(peer, life.keepers)
        return SaveChoice(
            str(life.shelves.own),
            wanted["save_every"],
            wanted["keep"],
            wanted["attempt"],
            tuple(sources),
            wanted["resume"],
            copy,
        )

    # ---- workers ---------------------------------------------------------------------------------------------------
    def _pass_on(self, life: _Attempt, fleet: WorkerProcesses) -> None:
        """What workers say, as it comes; how one died is known here only."""
        while life.fleet is fleet:
            said = fleet.next_said(LISTEN_S)
            if said is None or life.fleet is not fleet:
                continue
            what: Message = {"epoch": life.epoch, "said": said.name, "message": said.message}
            if said.message is None:
                what["how"] = fleet.how_it_died(said.name)
            elif "ready" in said.message and life.shelves is not None:
                life.shelves.forget_fetched()  # they have read what they needed before they listened
            try:
                self._caller.channel.send(what)
            except WorkerError as error:  # on a thread: `run` must hear of it
                self._caller.channel.inbox.put({"gone": str(error)})
                return

    def _end(self) -> None:
        life, self._life = self._life, None
        if life is None:
            return
        fleet, life.fleet = life.fleet, None
        if fleet is not None:
            fleet.close()
        if life.passing is not None:
            life.passing.join()
        if life.shelves is not None:
            life.shelves.close()

    def _now(self) -> _Attempt:
        assert self._life is not None
        return self._life
