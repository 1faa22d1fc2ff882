//! Simulates a virtual machine in one process: real [`Machine`]s with modelled shells, taskers and
//! task libraries.
//!
//! One seed determines a run. Only the order within each stream between hosts is fixed; every delay
//! is random. A task is a process with real [`Link`]s. It can quiesce, be paused, migrate to
//! another host, and resume by a resume token.

mod data_channels;
mod fake_world;
pub(super) mod fault_injection;
mod image_store;
mod links;
pub(super) mod message_faults;
mod outputs;
mod procs;
mod respawn;
#[path = "../../../../../libpvm/proto/tests/rng/mod.rs"]
mod rng;
mod taskers;

use crate::pair_streams::LaneId;
use crate::{
    ConnId, CopyPolicy, Event, HostPlan, Machine, MachineConfig, Output, StartId, StartedHost,
};
use bytes::Bytes;
use fake_world::FakeWorld;
pub(super) use procs::{Proc, Received};
pub(super) use respawn::EXIT_REQUEST_TAG;
use rng::Rng;
use sempa_proto::ids::RouteId;
use sempa_proto::link::{Link, LinkEvent, LinkFrame};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::migration::Verdict;
use sempa_proto::runtime_paths::RuntimePaths;
use sempa_proto::task::{
    Claim, Hello, OnDaemonExit, Reply, Request, ResumeToken, SendWatermark, TASK_MAGIC, ToDaemon,
    ToTask,
};
use sempa_proto::tasker::{FromTasker, TaskerCapabilities, ToTasker};
use sempa_proto::{HostId, Micros, MigrationId, PvmError, RequestId, Tid, WIRE_VERSION};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;

/// Simulated time after which a run that has not finished counts as stuck.
const STUCK_TIMEOUT: Micros = Micros::from_secs(600);
/// Time after which a silent host counts as lost.
const LEASE: Micros = Micros::from_millis(500);

pub(super) fn host(index: u16) -> HostId {
    HostId::new(index).expect("small")
}

/// Returns `count` seeds from 1 on. If `SEMPA_SEEDS` is set, their number is multiplied by it.
pub(super) fn seeds(count: u64) -> std::ops::Range<u64> {
    let factor = std::env::var("SEMPA_SEEDS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(1u64);
    1..count * factor
}

#[derive(Debug)]
pub(super) struct Node {
    pub(super) machine: Machine,
    world: FakeWorld,
    pub(super) is_alive: bool,
    pub(super) log: Vec<String>,
    pub(super) output: Vec<u8>,
    /// Migrations whose images this host expects.
    expected_images: BTreeSet<MigrationId>,
    /// True if the tasker is dead and the daemon does not know it yet: messages to the tasker are
    /// lost.
    pub(super) tasker_dead: bool,
    /// Events to handle when the daemon resumes; `None` while it runs.
    deferred_events: Option<fault_injection::DeferredEvents>,
    /// Orders to deliver when the tasker resumes; `None` while it runs.
    deferred_orders: Option<Vec<ToTasker>>,
}

#[derive(Clone, Debug)]
enum SimEvent {
    Machine(HostId, Event),
    Data(data_channels::ChannelId, data_channels::StreamItem),
    ToProc(usize, ConnId, ToTask),
    LinkToProc(usize, ConnId, Bytes),
    CloseProc(ConnId),
    /// The time that a process may run before its pause has passed. The number is that of the order
    /// to pause; a later order replaces it.
    PauseNow(HostId, usize, u64),
    LossNoticed(HostId, HostId),
    VictimResumes(fault_injection::Victim),
    /// All post-copy memory of a task has arrived, or the transfer failed. The values are the
    /// target host, the migration, the source host, and the task.
    MemoryTransferEnded(HostId, MigrationId, HostId, Tid),
    Reconnected(HostId, HostId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Channel {
    Control(HostId, HostId),
    Data(HostId, HostId),
    Lane(data_channels::ChannelId, LaneId),
    ToProc(ConnId),
    FromProc(ConnId),
    Tasker(HostId),
}

/// Probabilities of random faults, in percent.
#[derive(Debug, Default)]
pub(super) struct RandomFaults {
    /// Percentage of migration steps that fail.
    pub(super) failed_steps_percent: u64,
    /// Percentage of quiesce requests that reach the library late.
    pub(super) slow_quiesce_percent: u64,
}

#[derive(Debug)]
pub(super) struct Sim {
    pub(super) seed: u64,
    pub(super) rng: Rng,
    pub(super) now: Micros,
    queue: BTreeMap<(Micros, u64), SimEvent>,
    serial: u64,
    channels: BTreeMap<Channel, Micros>,
    pub(super) nodes: BTreeMap<HostId, Node>,
    pub(super) procs: Vec<Proc>,
    conns: BTreeMap<ConnId, usize>,
    next_conn: u64,
    sessions: BTreeSet<(HostId, HostId)>,
    data_channels: data_channels::DataChannels,
    unsent: BTreeMap<(HostId, HostId), data_channels::Unsent>,
    tokens: BTreeMap<(HostId, PathBuf), ResumeToken>,
    pub(super) random_faults: RandomFaults,
    pub(super) injection: fault_injection::FaultInjection,
    pub(super) message_faults: message_faults::MessageFaults,
    pub(super) recorded_migrations: Vec<(MigrationId, Tid, HostId)>,
    /// Migrations whose task runs before its memory has arrived.
    post_copy_migrations: BTreeSet<MigrationId>,
    /// Target host of each migration that accepts pre-copied memory.
    pre_copy_targets: BTreeMap<MigrationId, HostId>,
    pub(super) abandoned_starts: Vec<StartId>,
    /// Host starts that were prepared for a hoster task.
    prepared_starts: Vec<(StartId, HostPlan)>,
    /// Signals to processes that no simulated tasker has started.
    pub(super) signalled: Vec<(usize, i32)>,
    /// Reasons for which a host refuses every task, by host.
    pub(super) verdicts: BTreeMap<HostId, Verdict>,
    pub(super) image_store: image_store::ImageStore,
    /// Process and task of each program that a migration has started and that waits for permission
    /// to run, by host and migration.
    respawned: BTreeMap<(HostId, MigrationId), (usize, Tid)>,
    /// Programs that ignored a request to exit.
    pub(super) exit_ignored_by: Vec<usize>,
}

fn pair(a: HostId, b: HostId) -> (HostId, HostId) {
    (a.min(b), a.max(b))
}

/// Returns the address of a host. Four consecutive indices share a network.
fn address(id: HostId) -> SocketAddr {
    SocketAddr::from(([10, 0, (id.index() / 4) as u8, id.index() as u8], 4))
}

fn config(id: HostId, name: &str) -> MachineConfig {
    let tmp = format!("/sim/{}", id.index());
    MachineConfig {
        host: id,
        name: name.to_string(),
        vm: "pvm".into(),
        arch: "LINUX64".into(),
        dsig: DSIG_X86_64,
        addresses: vec![address(id)],
        speed: 1000,
        uid: 1000,
        lease: LEASE,
        rm_command: None,
        server_commands: Vec::new(),
        paths: RuntimePaths::from_env(1000, move |v| (v == "PVM_TMP").then(|| tmp.clone()))
            .expect("a good place"),
        hostfile: Vec::new(),
        reserved_ids_max: BTreeMap::new(),
        copies: CopyPolicy::default(),
    }
}

impl Sim {
    /// Creates a master without other hosts.
    pub(super) fn new(seed: u64) -> Sim {
        Sim::with(seed, |_| {})
    }

    pub(super) fn with(seed: u64, change: impl Fn(&mut MachineConfig)) -> Sim {
        let mut sim = Sim {
            seed,
            rng: Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            now: Micros(1),
            queue: BTreeMap::new(),
            serial: 0,
            channels: BTreeMap::new(),
            nodes: BTreeMap::new(),
            procs: Vec::new(),
            conns: BTreeMap::new(),
            next_conn: 0,
            sessions: BTreeSet::new(),
            data_channels: data_channels::DataChannels::default(),
            unsent: BTreeMap::new(),
            tokens: BTreeMap::new(),
            random_faults: RandomFaults::default(),
            injection: fault_injection::FaultInjection::default(),
            message_faults: message_faults::MessageFaults::default(),
            recorded_migrations: Vec::new(),
            post_copy_migrations: BTreeSet::new(),
            pre_copy_targets: BTreeMap::new(),
            abandoned_starts: Vec::new(),
            prepared_starts: Vec::new(),
            signalled: Vec::new(),
            verdicts: BTreeMap::new(),
            image_store: image_store::ImageStore::default(),
            respawned: BTreeMap::new(),
            exit_ignored_by: Vec::new(),
        };
        let mut first = config(HostId::MASTER, "h1");
        change(&mut first);
        sim.boot(first);
        sim
    }

    /// Creates a master, the hosts `h2` to `hN`, and a console on the master. Returns the
    /// simulation and the console's process.
    pub(super) fn cluster(seed: u64, hosts: usize) -> (Sim, usize) {
        Sim::cluster_with(seed, hosts, |_| {})
    }

    /// As [`Sim::cluster`], with a changed configuration of the master.
    pub(super) fn cluster_with(
        seed: u64,
        hosts: usize,
        change: impl Fn(&mut MachineConfig),
    ) -> (Sim, usize) {
        let mut sim = Sim::with(seed, change);
        let console = sim.enrol(HostId::MASTER);
        let lines: Vec<String> = (2..=hosts).map(|n| format!("h{n}")).collect();
        if !lines.is_empty() {
            let reply = sim.ask(console, Request::AddHosts { lines });
            let Reply::HostsAdded(added) = reply else {
                panic!("{reply:?}")
            };
            assert!(added.iter().all(|a| a.result.is_ok()), "{added:?}");
        }
        (sim, console)
    }

    fn boot(&mut self, config: MachineConfig) {
        let id = config.host;
        let machine = Machine::new(config, self.now);
        let world = FakeWorld {
            secret: i32::from(id.index()) * 1_000_000,
            unix_time: self.now,
            missing_program: None,
        };
        let (log, output, expected_images) = (vec![], vec![], BTreeSet::new());
        let (deferred_events, deferred_orders) = (None, None);
        let node = Node {
            machine,
            world,
            is_alive: true,
            log,
            output,
            expected_images,
            tasker_dead: false,
            deferred_events,
            deferred_orders,
        };
        self.nodes.insert(id, node);
        self.flush(id);
        let ready = FromTasker::Ready(TaskerCapabilities {
            pid_namespaces: true,
            engine: Ok("fake".into()),
            freezer: Ok(()),
        });
        self.send_from_tasker(id, ready);
    }

    pub(super) fn schedule_event(&mut self, at: Micros, what: Event, on: HostId) {
        self.schedule(at, SimEvent::Machine(on, what));
    }

    fn schedule(&mut self, at: Micros, what: SimEvent) {
        self.serial += 1;
        self.queue.insert((at, self.serial), what);
    }

    fn send_in_order(&mut self, channel: Channel, what: SimEvent) {
        let at = self.now + Micros(self.rng.below(2_000));
        let last = self.channels.entry(channel).or_default();
        *last = at.max(*last);
        let at = *last;
        self.schedule(at, what);
    }

    fn send_from_tasker(&mut self, on: HostId, message: FromTasker) {
        self.send_in_order(
            Channel::Tasker(on),
            SimEvent::Machine(on, Event::Tasker(message)),
        );
    }

    fn start_host(&mut self, start: StartId, plan: HostPlan) {
        let at = self.now + Micros(self.rng.below(300_000));
        let result = if plan.name.starts_with("bad") {
            Err((PvmError::CantStart, format!("no way to {}", plan.name)))
        } else {
            let mut config = config(plan.id, &plan.name);
            config.speed = plan.speed;
            self.boot(config);
            if !plan.name.starts_with("mute") {
                self.connect_hosts(HostId::MASTER, plan.id);
            }
            Ok(StartedHost {
                arch: "LINUX64".into(),
                dsig: DSIG_X86_64,
                addresses: vec![address(plan.id)],
            })
        };
        self.schedule(
            at,
            SimEvent::Machine(HostId::MASTER, Event::HostStarted { start, result }),
        );
    }

    pub(super) fn remove_program(&mut self, on: HostId, name: &'static str) {
        self.nodes
            .get_mut(&on)
            .expect("it is there")
            .world
            .missing_program = Some(name);
    }

    /// True if the master has removed the host: its tasks count as dead.
    fn is_removed(&self, host: HostId) -> bool {
        self.nodes[&HostId::MASTER]
            .machine
            .table()
            .get(host)
            .is_none()
    }

    /// Kills a host. The other hosts notice its silence.
    pub(super) fn kill_host(&mut self, lost: HostId) {
        let Some(node) = self.nodes.get_mut(&lost) else {
            return;
        };
        node.is_alive = false;
        self.end_procs(lost, |_| true);
        self.end_sessions(lost);
    }

    /// Ends those processes of a host that match.
    fn end_procs(&mut self, on: HostId, matches: impl Fn(&Proc) -> bool) {
        for p in self.procs.iter_mut().filter(|p| p.host == on && matches(p)) {
            // A dumped process can be built from its images.
            p.images_remain |= p.stopped_for_migration && !p.exited;
            p.exited = true;
        }
    }

    /// Drops the messages that are in flight from one host to another, as when the sender dies.
    pub(super) fn drop_in_flight(&mut self, from: HostId, to: HostId) {
        self.queue.retain(|_, happening| match happening {
            SimEvent::Machine(on, Event::HostControl { host, .. }) => (*host, *on) != (from, to),
            SimEvent::Data((one, other, _), _) => (*one, *other) != (from, to),
            _ => true,
        });
    }

    /// Separates two hosts for the time `duration` and drops the messages in flight between them.
    /// Other hosts still reach both hosts.
    pub(super) fn separate(&mut self, a: HostId, b: HostId, duration: Micros) {
        if !self.sessions.remove(&pair(a, b)) {
            return;
        }
        for (by, other) in [(a, b), (b, a)] {
            self.drop_in_flight(by, other);
            // The loss is noticed before the connection returns.
            let seen = self.now + Micros(self.rng.below(duration.0.min(LEASE.0)));
            self.schedule(seen, SimEvent::LossNoticed(by, other));
        }
        self.schedule(self.now + duration, SimEvent::Reconnected(a, b));
    }

    fn end_sessions(&mut self, lost: HostId) {
        let ended: Vec<(HostId, HostId)> = self
            .sessions
            .iter()
            .copied()
            .filter(|(a, b)| *a == lost || *b == lost)
            .collect();
        for (a, b) in ended {
            self.sessions.remove(&(a, b));
            let other = if a == lost { b } else { a };
            let at = self.now + LEASE + Micros(self.rng.below(200_000));
            self.schedule(at, SimEvent::LossNoticed(other, lost));
        }
    }

    fn process(
        &mut self,
        on: HostId,
        program: &str,
        spawned: Option<Tid>,
        env: Vec<String>,
    ) -> usize {
        self.procs.push(Proc {
            host: on,
            program: program.to_string(),
            spawned_tid: spawned,
            env,
            on_daemon_exit: OnDaemonExit::Terminate,
            conn: None,
            welcome: None,
            refused: None,
            rm: None,
            links: BTreeMap::new(),
            route: 0,
            incarnation: 0,
            sent_counts: BTreeMap::new(),
            pending_requests: BTreeMap::new(),
            replies: BTreeMap::new(),
            next_request: 0,
            received: Vec::new(),
            daemon_messages: Vec::new(),
            deferred_notifications: Vec::new(),
            quiesced: None,
            stopped_for_migration: false,
            paused: false,
            pause_serial: 0,
            quiesce_runs: 0,
            deferred_events: Vec::new(),
            claim: None,
            handed_off_for: None,
            exit_requested: false,
            exit_status: None,
            exited: false,
            images_remain: false,
            cpu_micros: 0,
        });
        self.procs.len() - 1
    }

    /// Connects a process to the daemon of its host and sends its claim.
    pub(super) fn connect(&mut self, proc: usize, claim: Claim) -> ConnId {
        self.next_conn += 1;
        let conn = ConnId(self.next_conn);
        let on = self.procs[proc].host;
        self.procs[proc].conn = Some(conn);
        self.conns.insert(conn, proc);
        let pid = proc as i32 + 100;
        self.send_from_proc(conn, on, Event::TaskConnected { conn, pid });
        let program = self.procs[proc].program.clone();
        let at_end = self.procs[proc].on_daemon_exit;
        let hello = Hello {
            magic: TASK_MAGIC,
            version: WIRE_VERSION,
            claim,
            own_pid: pid,
            program,
            on_daemon_exit: at_end,
        };
        self.send_from_proc(
            conn,
            on,
            Event::TaskControl {
                conn,
                message: ToDaemon::Hello(hello),
            },
        );
        conn
    }

    /// Delays everything that a process sends by at least `by`, as if the daemon were busy with
    /// other tasks.
    pub(super) fn delay_proc(&mut self, proc: usize, by: Micros) {
        let conn = self.procs[proc].conn.expect("connected");
        let at = self.channels.entry(Channel::FromProc(conn)).or_default();
        *at = (self.now + by).max(*at);
    }

    pub(super) fn send_from_proc(&mut self, conn: ConnId, on: HostId, event: Event) {
        self.send_in_order(Channel::FromProc(conn), SimEvent::Machine(on, event));
    }

    /// Starts a process as from a command line. Returns when it has enrolled.
    pub(super) fn enrol(&mut self, on: HostId) -> usize {
        self.enrol_with(on, OnDaemonExit::Terminate)
    }

    /// As [`Sim::enrol`], with the wanted action when the daemon ends.
    pub(super) fn enrol_with(&mut self, on: HostId, at_end: OnDaemonExit) -> usize {
        let proc = self.process(on, "cmd", None, vec![]);
        self.procs[proc].on_daemon_exit = at_end;
        self.connect(proc, Claim::New);
        self.run_until("accepted", |sim| sim.procs[proc].welcome.is_some());
        proc
    }

    /// Starts a process that presents a claim. Does not wait for the answer.
    pub(super) fn claim(&mut self, on: HostId, claim: Claim) -> usize {
        let proc = self.process(on, "claimer", None, vec![]);
        self.connect(proc, claim);
        proc
    }

    pub(super) fn close(&mut self, proc: usize) {
        if let Some(conn) = self.procs[proc].conn.take() {
            let on = self.procs[proc].host;
            self.send_from_proc(
                conn,
                on,
                Event::TaskClosed {
                    conn,
                    protocol_error: None,
                },
            );
        }
    }

    /// Sends a request. The reply will be in `replies`.
    pub(super) fn request(&mut self, proc: usize, what: Request) -> RequestId {
        let p = &mut self.procs[proc];
        p.next_request += 1;
        let id = RequestId(p.next_request);
        let (conn, on) = (p.conn.expect("connected"), p.host);
        p.pending_requests.insert(id, what.clone());
        self.send_from_proc(
            conn,
            on,
            Event::TaskControl {
                conn,
                message: ToDaemon::Request { id, request: what },
            },
        );
        id
    }

    /// Sends a request and waits for its reply.
    pub(super) fn ask(&mut self, proc: usize, what: Request) -> Reply {
        let text = format!("{what:?}");
        let id = self.request(proc, what);
        self.run_until(&text, |sim| sim.procs[proc].replies.contains_key(&id));
        self.procs[proc].replies.remove(&id).expect("just seen")
    }

    /// Sends a message over the link to another task.
    pub(super) fn send_message(&mut self, proc: usize, dst: Tid, body: &[u8]) {
        let p = &mut self.procs[proc];
        let (tid, route, open) = (
            p.tid(),
            RouteId(p.route),
            p.conn.is_some() && p.quiesced.is_none(),
        );
        let (now, line) = (self.now, p.incarnation);
        let link = p.links.entry(dst).or_insert_with(|| {
            let mut link = Link::new(tid, dst);
            link.begin_incarnation(line, true);
            if open {
                link.handle(now, LinkEvent::RouteUp(route));
            }
            link
        });
        link.send(Bytes::new(), Bytes::copy_from_slice(body))
            .expect("far from full");
        self.run_links(proc);
    }

    fn deliver_to_proc(&mut self, proc: usize, conn: ConnId, message: ToTask) {
        if self.procs[proc].conn != Some(conn) || self.procs[proc].exited {
            return;
        }
        let now = self.now;
        match message {
            ToTask::Welcome(welcome) => self.on_welcome(proc, welcome),
            ToTask::Refused { reason } => self.procs[proc].refused = Some(reason),
            ToTask::Reply { id, reply } => {
                self.procs[proc].pending_requests.remove(&id);
                assert!(
                    self.procs[proc].replies.insert(id, reply).is_none(),
                    "{id} got two replies"
                );
            }
            ToTask::Deliver {
                message,
                deliver_after: after,
            } => {
                match after {
                    Some(mark) => {
                        self.link_of(proc, mark.peer);
                        self.procs[proc]
                            .deferred_notifications
                            .push((mark, message));
                    }
                    None => self.procs[proc]
                        .received
                        .push(Received::Notification(message)),
                }
                self.run_links(proc);
            }
            ToTask::PeerGone { tid } => {
                self.procs[proc].daemon_messages.push(message);
                self.link_of(proc, tid).handle(now, LinkEvent::PeerGone);
                self.run_links(proc);
            }
            ToTask::PeerMigrated { tid } => {
                self.procs[proc].daemon_messages.push(message);
                self.link_of(proc, tid).handle(now, LinkEvent::PeerMigrated);
                self.run_links(proc);
            }
            ToTask::RmChanged { rm } => self.procs[proc].rm = rm,
            ToTask::Route { .. } => self.procs[proc].daemon_messages.push(message),
            ToTask::PrepareExit { migration: by } => self.prepare_exit(proc, by),
            ToTask::Quiesce { migration, tokens } => {
                let p = &mut self.procs[proc];
                assert!(p.quiesced.is_none(), "asked to quiesce twice");
                let marks = p
                    .links
                    .values()
                    .map(|l| SendWatermark {
                        peer: l.peer(),
                        end_seq: l.queued_end_seq(),
                    })
                    .collect();
                let on = p.host;
                p.quiesced = Some((migration, tokens));
                let message = ToDaemon::Quiesced {
                    migration,
                    watermarks: marks,
                    redirect_address: taskers::redirect_address(proc),
                };
                self.send_from_proc(conn, on, Event::TaskControl { conn, message });
                self.close(proc);
                self.notify_links(proc, &LinkEvent::RouteDown);
            }
        }
    }

    /// Lets quiesced libraries look for their resume tokens.
    fn look_for_tokens(&mut self) {
        for proc in 0..self.procs.len() {
            let p = &self.procs[proc];
            let Some((migration, paths)) = &p.quiesced else {
                continue;
            };
            if p.is_frozen() || p.exited || p.conn.is_some() {
                continue;
            }
            let token = paths
                .iter()
                .find_map(|path| self.tokens.get(&(p.host, path.clone())));
            if token.is_some_and(|t| t.migration == *migration) {
                let claim = Claim::Resume {
                    tid: p.tid(),
                    migration: *migration,
                };
                self.connect(proc, claim);
            }
        }
    }

    /// Passes an event to a machine and carries out its outputs.
    pub(super) fn handle(&mut self, on: HostId, event: Event) {
        let message = self.counted_message(on, &event);
        self.reach_message_point(message.as_ref(), fault_injection::StepEdge::Before);
        self.handle_event(on, event);
        self.reach_message_point(message.as_ref(), fault_injection::StepEdge::After);
    }

    fn handle_event(&mut self, on: HostId, event: Event) {
        let Some(node) = self.nodes.get_mut(&on).filter(|n| n.is_alive) else {
            return;
        };
        if let Some(late) = &mut node.deferred_events {
            return late.push(event);
        }
        node.world.unix_time = self.now;
        node.tasker_dead &= !matches!(event, Event::TaskerGone { .. });
        node.machine.handle(self.now, &mut node.world, event);
        self.flush(on);
    }

    /// Passes an event to a machine at a given time. Returns its outputs without carrying them out.
    pub(super) fn outputs_of(&mut self, on: HostId, now: Micros, event: Event) -> Vec<Output> {
        let node = self.nodes.get_mut(&on).expect("there");
        node.machine.handle(now, &mut node.world, event);
        std::iter::from_fn(|| node.machine.poll()).collect()
    }

    fn flush(&mut self, on: HostId) {
        let runs = |n: &&mut Node| n.is_alive && n.deferred_events.is_none();
        while let Some(output) = self
            .nodes
            .get_mut(&on)
            .filter(runs)
            .and_then(|n| n.machine.poll())
        {
            self.carry_out(on, output);
        }
    }

    fn next_time(&self) -> Option<Micros> {
        let queued = self.queue.keys().next().map(|(at, _)| *at);
        let machines = self
            .nodes
            .values()
            .filter(|n| n.is_alive && n.deferred_events.is_none())
            .filter_map(|n| n.machine.next_wakeup());
        let live = self
            .procs
            .iter()
            .filter(|p| !p.exited && !p.is_frozen() && p.conn.is_some());
        let links = live.flat_map(|p| p.links.values().filter_map(Link::next_wakeup));
        machines.chain(links).chain(queued).min()
    }

    /// Handles the next event. Returns false when there is none.
    pub(super) fn step(&mut self) -> bool {
        self.look_for_tokens();
        let Some(at) = self.next_time() else {
            return false;
        };
        self.now = self.now.max(at);
        let due = self
            .queue
            .first_entry()
            .filter(|e| e.key().0 <= self.now)
            .map(|e| e.remove());
        self.dispatch(due);
        true
    }

    fn dispatch(&mut self, due_event: Option<SimEvent>) {
        let to = match &due_event {
            Some(SimEvent::ToProc(proc, ..) | SimEvent::LinkToProc(proc, ..)) => Some(*proc),
            Some(SimEvent::CloseProc(conn)) => self.conns.get(conn).copied(),
            _ => None,
        };
        if let Some(proc) = to.filter(|proc| self.procs[*proc].is_frozen()) {
            return self.procs[proc].deferred_events.extend(due_event);
        }
        match due_event {
            Some(SimEvent::Machine(on, event)) => self.handle(on, event),
            Some(SimEvent::Data(wire, parcel)) => {
                self.data_channels
                    .on_arrival(wire, parcel)
                    .into_iter()
                    .for_each(|event| self.handle(wire.1, event));
            }
            Some(SimEvent::ToProc(proc, conn, message)) => {
                self.deliver_to_proc(proc, conn, message)
            }
            Some(SimEvent::LinkToProc(proc, conn, bytes)) => {
                if self.procs[proc].conn == Some(conn) && !self.procs[proc].exited {
                    let frame = LinkFrame::decode(bytes).expect("daemons pass on what they got");
                    let now = self.now;
                    if self.accept_returned(proc, &frame) {
                        return;
                    }
                    self.link_of(proc, frame.src)
                        .handle(now, LinkEvent::Frame(frame));
                    self.run_links(proc);
                }
            }
            Some(SimEvent::CloseProc(conn)) => {
                if let Some(proc) = self
                    .conns
                    .get(&conn)
                    .copied()
                    .filter(|p| self.procs[*p].conn == Some(conn))
                {
                    self.close(proc);
                }
            }
            Some(SimEvent::LossNoticed(by, lost)) => {
                self.handle(
                    by,
                    Event::HostLost {
                        host: lost,
                        why: "silence".into(),
                    },
                );
            }
            Some(SimEvent::Reconnected(a, b)) => self.connect_hosts(a, b),
            Some(SimEvent::VictimResumes(party)) => self.resume_victim(party),
            Some(SimEvent::MemoryTransferEnded(on, migration, from, tid)) => {
                self.end_memory_transfer(on, migration, from, tid)
            }
            Some(SimEvent::PauseNow(on, proc, number)) => self.pause_now(on, proc, number),
            None => self.wake_all(),
        }
    }

    fn wake_all(&mut self) {
        let now = self.now;
        let due = |n: &Node| {
            n.is_alive
                && n.deferred_events.is_none()
                && n.machine.next_wakeup().is_some_and(|at| at <= now)
        };
        let nodes: Vec<HostId> = self
            .nodes
            .iter()
            .filter(|(_, n)| due(n))
            .map(|(id, _)| *id)
            .collect();
        for id in nodes {
            self.handle(id, Event::Wake);
        }
        for proc in 0..self.procs.len() {
            let p = &mut self.procs[proc];
            if !p.exited && !p.is_frozen() && p.conn.is_some() {
                p.links
                    .values_mut()
                    .filter(|l| l.next_wakeup().is_some_and(|at| at <= now))
                    .for_each(|l| {
                        l.handle(now, LinkEvent::Wake);
                    });
                self.run_links(proc);
            }
        }
    }

    /// Runs until the condition holds. Panics with the logs if it never does.
    pub(super) fn run_until(&mut self, what: &str, condition: impl Fn(&Sim) -> bool) {
        let end = self.now + STUCK_TIMEOUT;
        while !condition(self) {
            if self.now > end || !self.step() {
                let logs: Vec<String> = self
                    .nodes
                    .iter()
                    .map(|(id, n)| format!("{id}:\n  {}", n.log.join("\n  ")))
                    .collect();
                panic!(
                    "never happened: {what} (seed {})\n{}\n{}",
                    self.seed,
                    logs.join("\n"),
                    self.history()
                );
            }
        }
    }

    /// Returns the event log and the state of all processes, for the message of a failed run.
    pub(super) fn history(&self) -> String {
        let master = self.nodes[&HostId::MASTER]
            .machine
            .master
            .as_ref()
            .expect("it is the master");
        let events = master
            .events
            .entries_since(0, 10_000)
            .into_iter()
            .map(|e| format!("{} {}", e.at.0, e.kind));
        let procs = self.procs.iter().enumerate().map(|(n, p)| {
            let Proc { host, spawned_tid: spawned, conn, quiesced, stopped_for_migration, exited, .. } = p;
            let spawned = spawned.map_or("-".into(), |t| t.to_string());
            format!("process {n} {spawned} on {host}: {conn:?} quiesced {quiesced:?} stopped {stopped_for_migration} exited {exited}")
        });
        events.chain(procs).collect::<Vec<_>>().join("\n")
    }

    /// Returns the number of resume tokens on live hosts.
    pub(super) fn tokens_left(&self) -> usize {
        self.tokens
            .keys()
            .filter(|(on, _)| self.nodes[on].is_alive)
            .count()
    }

    /// Advances the time by `span` and handles the events due until then.
    pub(super) fn advance(&mut self, span: Micros) {
        let end = self.now + span;
        while self.next_time().is_some_and(|at| at <= end) {
            self.step();
        }
        self.now = self.now.max(end);
    }
}
