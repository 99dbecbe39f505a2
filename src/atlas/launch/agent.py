"""One launcher's side of a run over several datacenters: starts its workers when the coordinator asks for it, forwards
messages to and from them, keeps checkpoints, and ends everything when asked to, or when the rendezvous is gone.

    <- {"begin": epoch, "name"}    -> {"begun": {site, server, stores, folder}}  a new attempt, at this place
    <- {"servers": {agent: address}, "stores": {agent: names}}  -> {"connected": true}
    <- {"choose": true}            -> {"chosen": {save, next}}          the checkpoint to resume from; the next attempt
    <- {"prepare": {...}}          -> {"prepared": pids}                its workers run, and have their assignments
    <- {"admit": {node: address}}  -> {"admitted": true}                workers that copy their checkpoints to here
    <- {"clock": any}              -> {"clock": ns}                     this host's, and so its workers'
    <- {"to": name, "message"}        for a worker; -> {"from": name, "message"} of one
    <- {"rails": [name, news]}        of a worker on another host (`site_rails`)
    <- {"done": n}                    this many steps are reported (`ledger`)
    <- {"end": true}                  ends the workers
    <- {"finish": {text, code}}       and the launcher
                                   -> {"interrupt": true}               Ctrl-C here ("scheduler": SIGTERM)
                                   -> {"rejoined": {start_ns}}          first, to a coordinator that was started again
                                   -> {"error": "...", "user_error": bool}

Knows its own hosts, folders and devices; decides nothing.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from atlas.addresses import LOOPBACK, is_loopback
from atlas.errors import START_AGAIN, AtlasError, StartAgainError, StopSignal, WorkerError
from atlas.ir.program import Program
from atlas.ir.text import from_text
from atlas.launch.checkpoint_exchange import CheckpointExchange
from atlas.launch.control_channel import Message, unpack_text
from atlas.launch.forkserver import fork_server
from atlas.launch.ledger import Ledger
from atlas.launch.machine import memory_name
from atlas.launch.preflight import WorkerNeed, devices_for, free_bytes, layers_of, require_memory
from atlas.launch.remote_workers import BY_SCHEDULER
from atlas.launch.rendezvous import AgentName, RendezvousClient
from atlas.launch.run_state import ATTEMPT_BITS
from atlas.launch.site_network import SiteNetwork
from atlas.launch.site_rails import EMULATED, SiteRails
from atlas.launch.site_records import SiteRecords
from atlas.launch.worker_logs import WorkerLogs, log_folder
from atlas.launch.worker_processes import WORKER, WorkerProcesses
from atlas.runtime.assignment import SHIPPED, Assignment, FillerChoice, SaveChoice, SumsKind, TrainingSetup, read
from atlas.runtime.topology import GroupShape, WorkerRole
from atlas.wan.security.credentials import Security
from atlas.wan.transport.base import Address, PeerRoute

POLL_S = 0.2
ROTATE_S = 10.0
"""Between looks at the sizes of log files."""


@dataclass(frozen=True)
class AgentSettings:
    """What differs from launcher to launcher, and the others need not know."""

    name: AgentName
    rendezvous: Address = ("127.0.0.1", 0)
    apart: bool = False
    """Whether `atlas coordinator` runs at `rendezvous`; otherwise the first launcher coordinates."""
    network: SiteNetwork = field(default_factory=SiteNetwork)
    certificates: Path | None = None
    trusted_networks: tuple[str, ...] = ()
    checkpoints: Path | str | None = None
    """A folder, or `s3://bucket/prefix`."""
    data: str = ""
    """This datacenter's shards; other datacenters may have them in other folders."""
    weights: str = ""
    logs: Path | None = None
    """The run's folder of logs; None: logs are deleted with the workers."""
    device: str = "cuda"
    local_rank: int | None = None
    """Of the first worker on this host, under torchrun; None: 0."""
    launchers_here: int = 1
    """On this host, sharing its range of ports; under torchrun one per worker."""
    auto_replan: bool = False
    """Whether to continue without a lost datacenter without asking."""
    without: tuple[str, ...] = ()
    """Datacenters that are known to be lost."""
    filler: FillerChoice | None = None
    """What uses the waits of its workers."""
    switch: str = EMULATED  # or the RESTCONF root of the optical switch


@dataclass
class _Attempt:
    """This launcher's part of the current attempt."""

    epoch: int
    datacenters: list[str]
    name: AgentName
    """The place of this launcher: a spare takes that of a lost host."""
    exchange: CheckpointExchange | None = None
    servers: dict[str, PeerRoute] | None = None
    workers: WorkerProcesses | None = None
    rails: SiteRails = field(default_factory=SiteRails)
    start_ns: int | None = None
    """When the workers began, on this host's clock."""
    ledger: Ledger = field(default_factory=Ledger)
    records: SiteRecords = field(default_factory=SiteRecords)
    forwarder: threading.Thread | None = None


class Agent:
    """`run` returns the launcher's exit code."""

    def __init__(
        self, settings: AgentSettings, client: RendezvousClient, security: Security, say: Callable[[str], None]
    ) -> None:
        self.settings, self.say = settings, say
        self._client, self._security = client, security
        self._attempt: _Attempt | None = None
        self._name = settings.name
        self._interrupted = False
        self._sending = threading.Lock()
        """Held while a message is recorded and sent, and while all is sent again."""
        client.restart, client.epoch = self._rejoin, lambda: self._attempt.epoch if self._attempt is not None else 0

    def run(self) -> int:
        fork_server(WORKER)  # it imports torch while this launcher waits for the others, or as a spare
        try:
            while True:
                message = self._next()
                if "gone" in message:
                    text = f"{message['gone']}. This datacenter's workers were stopped"
                    if message.get("code", START_AGAIN) != START_AGAIN:
                        raise AtlasError(text)
                    lost = ("rendezvous", ", or with --without NAME and another --rendezvous")
                    other, without = ("coordinator", "") if self.settings.apart else lost
                    raise StartAgainError(f"{text}. Start again when the {other} answers{without}")
                if "finish" in message:
                    return self._finish(message["finish"])
                self._handle(message)
        finally:
            self.close()

    def finish(self) -> None:
        """End `run` from another thread."""
        self._client.channel.inbox.put({"finish": {"text": "", "code": 0}})

    def close(self) -> None:
        self._end()
        self._client.close()

    def _next(self) -> Message:
        while True:
            try:
                return self._client.channel.inbox.get()
            except KeyboardInterrupt as interrupt:
                if self._interrupted:
                    raise
                self._interrupted = True
                self.say("stopping after this step, with a checkpoint; interrupt again to stop at once")
                self._client.channel.send({"interrupt": BY_SCHEDULER if isinstance(interrupt, StopSignal) else True})

    def _finish(self, how: Message) -> int:
        self._end()
        if how.get("text"):
            self.say(str(how["text"]))
        return int(how["code"])

    # ---- messages of the coordinator ---------------------------------------------------------------------------------
    def _handle(self, message: Message) -> None:
        if "begin" in message:
            self._end()
            name = AgentName(*message["name"])
            self._attempt = _Attempt(int(message["begin"]), list(message["datacenters"]), name)
            if name != self._name:
                self._name = name
                self.say(f"this host replaces {name}")
        attempt = self._attempt
        if attempt is None or ("begin" not in message and message["epoch"] != attempt.epoch):
            return  # of an attempt that has ended
        handlers: dict[str, Callable[[_Attempt, Message], None]] = {
            "begin": self._begin,
            "servers": self._connect,
            "choose": self._choose,
            "prepare": self._prepare,
            "admit": self._admit,
            "clock": lambda attempt, _message: self._reply(attempt, {"clock": time.monotonic_ns()}),
            "to": self._forward,
            "rails": lambda attempt, message: attempt.rails.receive(*message["rails"]),
            "done": self._note_done,
            "end": lambda _attempt, _message: self._end(),
        }
        kind = next(key for key in handlers if key in message)
        try:
            handlers[kind](attempt, message)
        except AtlasError as error:
            self._reply(attempt, {"error": str(error), "user_error": not isinstance(error, WorkerError)})
        except OSError as error:
            what = f"{error.filename or self.settings.network.listen}: {error.strerror or error}"
            self._reply(attempt, {"error": f"{what}. Fix it and start again", "user_error": True})

    def _reply(self, attempt: _Attempt, message: Message) -> None:
        self._client.channel.send({"epoch": attempt.epoch, **message})

    def _begin(self, attempt: _Attempt, message: Message) -> None:
        mine = self.settings
        facts = mine.network.facts(attempt.name, mine.rendezvous)
        private = mine.network.private or is_loopback(facts.local)
        about: Message = {"site": asdict(facts), "private": private, "device": mine.device}
        about |= {"machine": socket.gethostname(), "memory": memory_name(), "free_bytes": free_bytes()}
        if mine.checkpoints is None:
            self._reply(attempt, {"begun": {**about, "server": None, "stores": []}})
            return
        exchange = attempt.exchange = CheckpointExchange(
            str(mine.checkpoints),
            attempt.name,
            attempt.datacenters,
            (mine.network.listen, mine.network.port(0)),
            attempt.epoch,
            self._security,
        )
        found = {**about, "server": exchange.port, "stores": list(exchange.local)}
        self._reply(attempt, {"begun": {**found, "folder": exchange.folder_id}})

    def _connect(self, attempt: _Attempt, message: Message) -> None:
        attempt.servers = read(dict[str, PeerRoute], message["servers"])
        if attempt.exchange is not None:
            attempt.exchange.connect(attempt.servers, message["stores"])
        self._reply(attempt, {"connected": True})

    def _choose(self, attempt: _Attempt, message: Message) -> None:
        save, number = attempt.exchange.choose() if attempt.exchange is not None else (None, 0)
        self._reply(attempt, {"chosen": {"save": save, "next": number}})

    def _admit(self, attempt: _Attempt, message: Message) -> None:
        if attempt.exchange is not None:
            attempt.exchange.admit(read(dict[str, PeerRoute], message["admit"]))
        self._reply(attempt, {"admitted": True})

    def _forward(self, attempt: _Attempt, message: Message) -> None:
        if attempt.workers is None:
            return
        body = message["message"]
        attempt.start_ns = body.get("start_ns", attempt.start_ns)
        attempt.rails.begin(attempt.start_ns)
        if "complete" in body:
            with self._sending:
                attempt.ledger.complete(body["complete"])
        attempt.workers.send(str(message["to"]), body)

    def _note_done(self, attempt: _Attempt, message: Message) -> None:
        with self._sending:
            attempt.ledger.done(int(message["done"]))

    def _rejoin(self) -> None:
        """Report to a restarted coordinator the step of this launcher, and send what it may not have received."""
        with self._sending:
            attempt, messages = self._attempt, list[Message]()
            if attempt is not None:
                messages = [{"epoch": attempt.epoch, "rejoined": {"start_ns": attempt.start_ns}}]
                messages += attempt.ledger.messages
            if self._interrupted:
                messages.append({"interrupt": True})
            self._client.channel.restart(messages)

    def _prepare(self, attempt: _Attempt, message: Message) -> None:
        wanted, mine = message["prepare"], self.settings
        local = mine.network.facts(mine.name, mine.rendezvous).local
        sums, on_loopback = wanted["sums"]
        trainings = [self._local(read(TrainingSetup, group["training"]), sums) for group in wanted["groups"]]
        texts = [unpack_text(group["program"]) for group in wanted["groups"]]
        programs = [from_text(text) for text in texts]
        roles = [_role(wanted, programs, row) for row in wanted["workers"]]
        devices = devices_for(len(roles), mine.device, attempt.name.datacenter, mine.local_rank, tp=wanted["tp"])
        needs, beside = ([WorkerNeed(*need) for need in wanted[key]] for key in ("needs", "beside"))
        require_memory(needs, mine.device, tp=wanted["tp"], beside=beside)
        saves = attempt.exchange is not None
        mine.network.require_ports(len(roles), saves=saves, serves=saves)  # a new plan may have more workers here
        layers = [layer for role in roles for layer in layers_of(role, trainings[role.group])]
        save = self._save_choice(attempt, wanted, layers)
        attempt.records = SiteRecords.of(roles)
        workers = attempt.workers = WorkerProcesses(WORKER, [role.name for role in roles], self._logs(attempt))
        rails = attempt.rails = SiteRails(wanted["rails"], programs)
        rails.start(workers, partial(_role, wanted, programs), wanted, mine.switch, partial(self._reply, attempt))
        attempt.forwarder = threading.Thread(
            target=self._forward_replies, args=(attempt, workers), daemon=True, name="forwarder"
        )
        attempt.forwarder.start()
        for index, (role, device) in enumerate(zip(roles, devices, strict=True)):
            assignment = Assignment(
                worker=role.worker,
                program=texts[role.group],
                training=trainings[role.group],
                num_steps=wanted["num_steps"] - wanted["first_step"],
                first_step=wanted["first_step"],
                cell=role.cell,
                num_cells=role.num_cells,
                groups=role.groups,
                group=role.group,
                compute_ns=tuple(map(tuple, wanted["compute_ns"].get(role.name, ()))),
                device=device,
                tp=wanted["tp"],
                listen=mine.network.listen,
                sums_listen=LOOPBACK if on_loopback else local,
                shares_gpu=":" in mine.device,
                port=mine.network.port(index + saves),
                streams=wanted["streams"],
                certificates=str(mine.certificates or ""),
                trusted_networks=mine.trusted_networks,
                epoch=attempt.epoch,
                patience_s=wanted["patience_s"],
                circuits=rails.pairs[role.group],
                save=save and replace(save, prunes=index == 0),
                filler=None if mine.filler is None else replace(mine.filler, host=local),
            )
            workers.send(role.name, {"assignment": asdict(assignment)})
        self._reply(attempt, {"prepared": workers.pids})

    def _logs(self, attempt: _Attempt) -> WorkerLogs:
        mine, number = self.settings, attempt.epoch % (1 << ATTEMPT_BITS)
        if mine.logs is None:
            return WorkerLogs()
        return WorkerLogs(log_folder(mine.logs, number, mine.name.datacenter, mine.name.part))

    def _local(self, training: TrainingSetup, sums: SumsKind) -> TrainingSetup:
        """With this datacenter's own folders and sums."""
        data, model, mine = training.data, training.model, self.settings
        if data.folder and data.folder != SHIPPED:
            data = replace(data, folder=mine.data or data.folder)
        if model.weights:
            model = replace(model, weights=mine.weights or model.weights)
        return replace(training, data=data, model=model, sums=sums)

    def _save_choice(self, attempt: _Attempt, wanted: Message, layers: Sequence[str]) -> SaveChoice | None:
        exchange = attempt.exchange
        if exchange is None:
            return None
        sources: list[str] = []
        if wanted["resume"] is not None and layers:
            sources = exchange.fetch(wanted["resume"], layers)
        peer, copy = wanted["copy_to"], None
        if peer is not None and attempt.servers is not None:
            copy = exchange.copy_choice(peer, attempt.servers)
        return SaveChoice(
            exchange.own,
            wanted["save_every"],
            wanted["keep"],
            wanted["attempt"],
            tuple(sources),
            wanted["resume"],
            copy,
        )

    # ---- workers -----------------------------------------------------------------------------------------------------
    def _forward_replies(self, attempt: _Attempt, workers: WorkerProcesses) -> None:
        """Forward messages of workers as they come, with the exit reason, which only this host can find."""
        rotated = time.monotonic()
        while attempt.workers is workers:
            if time.monotonic() - rotated > ROTATE_S:
                workers.logs.rotate()
                rotated = time.monotonic()
            new = workers.next_message(POLL_S)
            if new is None or attempt.workers is not workers:
                continue
            more = {} if new.message is not None else {"exit_reason": workers.exit_reason(new.name)}
            if new.message is not None and "ready" in new.message and attempt.exchange is not None:
                attempt.exchange.delete_fetched()  # workers have read what they need before they listen
            try:
                self._forward_reply(attempt, new.name, new.message, more)
            except WorkerError as error:  # on a thread: reported through the inbox of `run`
                self._client.channel.inbox.put({"gone": str(error)})
                return

    def _forward_reply(self, attempt: _Attempt, name: str, body: Message | None, more: Message) -> None:
        body = attempt.records.reduced(name, body)
        forwarded: Message = {"epoch": attempt.epoch, "from": name, "message": body, **more}
        with self._sending:
            attempt.ledger.add(forwarded)
            if (message := attempt.records.joined(forwarded)) is not None:
                self._client.channel.send(message)

    def _end(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        workers, attempt.workers = attempt.workers, None
        attempt.rails.close()
        if workers is not None:
            workers.close()
        if attempt.forwarder is not None:
            attempt.forwarder.join()
        if attempt.exchange is not None:
            attempt.exchange.close()


def _role(wanted: Message, programs: Sequence[Program], row: Sequence[int]) -> WorkerRole:
    """Of a worker, by group, cell and number. `programs`: of all groups of pipelines."""
    (group, cell, worker), shapes = row, tuple(read(GroupShape, s) for s in wanted["shapes"])
    return WorkerRole(programs[group], worker, cell, wanted["groups"][group]["num_cells"], shapes, group)
