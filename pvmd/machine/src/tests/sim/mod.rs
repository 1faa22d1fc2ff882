//! Simulates a virtual machine in one process: real [`Machine`]s with modelled shells, taskers and
//! task libraries.
//!
//! One seed determines a run. Only the order within each [`Channel`] between two parties is fixed;
//! every delay is random. A simulated task is a process with real [`Link`]s. It can quiesce, be
//! paused, migrate to another host, and resume by a resume token.

mod config;
mod data_channels;
mod fake_world;
pub(super) mod fault_injection;
mod image_store;
mod leases;
mod links;
mod losses;
pub(super) mod message_faults;
mod outputs;
mod procs;
mod respawn;
#[path = "../../../../../libpvm/proto/tests/rng/mod.rs"]
mod rng;
mod taskers;

use crate::pair_streams::LaneId;
use crate::{ConnId, Event, HostPlan, Machine, MachineConfig, Output, StartId, StartedHost};
use bytes::Bytes;
use config::{host_address, machine_config};
use fake_world::FakeWorld;
pub(super) use procs::{Proc, Received};
pub(super) use respawn::EXIT_REQUEST_TAG;
use rng::Rng;
use sempa_proto::causal::Past;
use sempa_proto::ids::RouteId;
use sempa_proto::link::{Link, LinkEvent, LinkFrame};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::migration::Verdict;
use sempa_proto::rm::{CTX_RM, TAG_PING};
use sempa_proto::task::{
    Claim, Hello, OnDaemonExit, Reply, Request, ResumeToken, SendWatermark, TASK_MAGIC, ToDaemon,
    ToTask,
};
use sempa_proto::tasker::{FromTasker, TaskerCapabilities, ToTasker};
use sempa_proto::{HostId, Micros, MigrationId, PvmError, RequestId, Tid, WIRE_VERSION};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
pub(super) use taskers::STARTED_NAMESPACE_PID;

/// Simulated time after which [`Sim::run_until`] fails a run that has not finished.
const STUCK_TIMEOUT: Micros = Micros::from_secs(600);
/// Time after which a silent host counts as lost.
pub(super) const LEASE: Micros = Micros::from_millis(500);

pub(super) fn host(index: u16) -> HostId {
    HostId::new(index).expect("small")
}

/// Returns the seeds 1 to `count`. If `SEMPA_SEEDS` is set, its value multiplies the number of
/// seeds.
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
    pub(super) task_output: Vec<u8>,
    pub(super) note: outputs::HostNote,
    /// Migrations for which this host must receive images.
    expected_images: BTreeSet<MigrationId>,
    /// True if the tasker is dead and the daemon has not yet been notified. Messages to the tasker
    /// are lost.
    pub(super) is_tasker_dead: bool,
    /// Events that the stopped daemon must handle when it resumes; `None` while it runs.
    deferred_events: Option<fault_injection::DeferredEvents>,
    /// Orders that the stopped tasker must receive when it resumes; `None` while it runs.
    deferred_orders: Option<Vec<ToTasker>>,
    tasker_lease: leases::TaskerLease,
}

#[derive(Clone, Debug)]
enum SimEvent {
    Machine(HostId, Event),
    DataItem(data_channels::ChannelId, data_channels::StreamItem),
    ToProc(usize, ConnId, ToTask),
    LinkToProc(usize, ConnId, Bytes),
    CloseProc(ConnId),
    /// The time for which a process may run before its pause has passed. The values are the host,
    /// the process, and the number of the order to pause. The event has no effect if a later order
    /// has replaced this order.
    PauseDue(HostId, usize, u64),
    /// The session of two hosts is lost. The first host is notified that the second host is lost.
    LossDetected(HostId, HostId),
    VictimResumption(fault_injection::Victim),
    /// All post-copy memory of a task has arrived, or the transfer failed. The values are the
    /// target host, the migration, the source host, and the task.
    MemoryTransferEnd(HostId, MigrationId, HostId, Tid),
    /// Two separated hosts can connect again.
    Reconnection(HostId, HostId),
    /// The lease of a host's tasker may have reached a deadline.
    LeaseCheck(HostId),
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
    next_event_serial: u64,
    /// Arrival time of the last event of each channel; later events of the channel arrive after
    /// this time.
    last_arrivals: BTreeMap<Channel, Micros>,
    pub(super) nodes: BTreeMap<HostId, Node>,
    pub(super) procs: Vec<Proc>,
    procs_by_conn: BTreeMap<ConnId, usize>,
    next_conn: u64,
    sessions: BTreeSet<(HostId, HostId)>,
    data_channels: data_channels::DataChannels,
    unsent_messages: BTreeMap<(HostId, HostId), data_channels::UnsentMessages>,
    resume_tokens: BTreeMap<(HostId, PathBuf), ResumeToken>,
    pub(super) random_faults: RandomFaults,
    pub(super) injection: fault_injection::FaultInjection,
    pub(super) message_faults: message_faults::MessageFaults,
    pub(super) recorded_migrations: Vec<(MigrationId, Tid, HostId)>,
    /// Migrations whose task runs before its memory has arrived.
    post_copy_migrations: BTreeSet<MigrationId>,
    /// Target host of each migration that accepts pre-copied memory.
    pre_copy_targets: BTreeMap<MigrationId, HostId>,
    pub(super) abandoned_starts: Vec<StartId>,
    /// Host starts for which a hoster task has an order.
    prepared_starts: Vec<(StartId, HostPlan)>,
    /// Signals that daemons sent to processes that no simulated tasker has started: the process and
    /// the signal.
    pub(super) sent_signals: Vec<(usize, i32)>,
    /// Reasons for which the tasker of a host refuses every task, by host. Other hosts accept every
    /// task.
    pub(super) verdicts: BTreeMap<HostId, Verdict>,
    pub(super) image_store: image_store::ImageStore,
    /// Process and task of each program that a migration or a restart has started and that waits
    /// for permission to run, by host and migration.
    respawned_procs: BTreeMap<(HostId, MigrationId), (usize, Tid)>,
    /// Processes that ignored a request to exit, one entry for each request.
    pub(super) exit_ignoring_procs: Vec<usize>,
    /// What ended tasks have left behind on each host; true if it is stopped.
    pub(super) leftovers: BTreeMap<(HostId, Tid), bool>,
    /// True if leftover processes do not stop, so that no tasker reports that they have stopped.
    pub(super) leftovers_never_stop: bool,
}

fn host_pair(a: HostId, b: HostId) -> (HostId, HostId) {
    (a.min(b), a.max(b))
}

impl Sim {
    /// Creates a master without other hosts.
    pub(super) fn new(seed: u64) -> Self {
        Self::with_config(seed, |_| {})
    }

    pub(super) fn with_config(seed: u64, configure: impl Fn(&mut MachineConfig)) -> Self {
        let mut sim = Self {
            seed,
            rng: Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            now: Micros(1),
            queue: BTreeMap::new(),
            next_event_serial: 0,
            last_arrivals: BTreeMap::new(),
            nodes: BTreeMap::new(),
            procs: Vec::new(),
            procs_by_conn: BTreeMap::new(),
            next_conn: 0,
            sessions: BTreeSet::new(),
            data_channels: data_channels::DataChannels::default(),
            unsent_messages: BTreeMap::new(),
            resume_tokens: BTreeMap::new(),
            random_faults: RandomFaults::default(),
            injection: fault_injection::FaultInjection::default(),
            message_faults: message_faults::MessageFaults::default(),
            recorded_migrations: Vec::new(),
            post_copy_migrations: BTreeSet::new(),
            pre_copy_targets: BTreeMap::new(),
            abandoned_starts: Vec::new(),
            prepared_starts: Vec::new(),
            sent_signals: Vec::new(),
            verdicts: BTreeMap::new(),
            image_store: image_store::ImageStore::default(),
            respawned_procs: BTreeMap::new(),
            exit_ignoring_procs: Vec::new(),
            leftovers: BTreeMap::new(),
            leftovers_never_stop: false,
        };
        let mut master_config = machine_config(HostId::MASTER, "h1");
        configure(&mut master_config);
        sim.boot_host(master_config);
        sim
    }

    /// Creates a master, the hosts `h2` to `hN`, and a console on the master. Returns the
    /// simulation and the console's process.
    pub(super) fn cluster(seed: u64, hosts: usize) -> (Self, usize) {
        Self::cluster_with(seed, hosts, |_| {})
    }

    /// Creates the same virtual machine as [`Sim::cluster`]; `configure` may edit the master's
    /// configuration.
    pub(super) fn cluster_with(
        seed: u64,
        hosts: usize,
        configure: impl Fn(&mut MachineConfig),
    ) -> (Self, usize) {
        let mut sim = Self::with_config(seed, configure);
        let console = sim.enrol(HostId::MASTER);
        let host_lines: Vec<String> = (2..=hosts).map(|n| format!("h{n}")).collect();
        if !host_lines.is_empty() {
            let reply = sim.ask(
                console,
                Request::AddHosts {
                    host_file_lines: host_lines,
                },
            );
            let Reply::HostsAdded(results) = reply else {
                panic!("{reply:?}")
            };
            assert!(results.iter().all(|a| a.result.is_ok()), "{results:?}");
        }
        (sim, console)
    }

    fn boot_host(&mut self, config: MachineConfig) {
        let id = config.host;
        let machine = Machine::new(config, self.now);
        let world = FakeWorld {
            secret: i32::from(id.index()) * 1_000_000,
            unix_time: self.now,
            missing_program: None,
        };
        let (log, task_output, expected_images) = (vec![], vec![], BTreeSet::new());
        let node = Node {
            machine,
            world,
            is_alive: true,
            log,
            note: outputs::HostNote::default(),
            task_output,
            expected_images,
            is_tasker_dead: false,
            deferred_events: None,
            deferred_orders: None,
            tasker_lease: leases::TaskerLease::default(),
        };
        self.nodes.insert(id, node);
        self.carry_out_outputs(id);
        let ready_message = FromTasker::Ready(TaskerCapabilities {
            pid_namespaces: true,
            engine_version: Ok("fake".into()),
            freezer: Ok(()),
            missing_capabilities: Vec::new(),
        });
        self.send_from_tasker(id, ready_message);
    }

    pub(super) fn schedule_event(&mut self, at: Micros, event: Event, host_id: HostId) {
        self.schedule(at, SimEvent::Machine(host_id, event));
    }

    fn schedule(&mut self, at: Micros, event: SimEvent) {
        self.next_event_serial += 1;
        self.queue.insert((at, self.next_event_serial), event);
    }

    fn send_in_order(&mut self, channel: Channel, event: SimEvent) {
        let at = self.now + Micros(self.rng.below(2_000));
        let last_arrival = self.last_arrivals.entry(channel).or_default();
        *last_arrival = at.max(*last_arrival);
        let at = *last_arrival;
        self.schedule(at, event);
    }

    pub(in crate::tests) fn send_from_tasker(&mut self, host_id: HostId, message: FromTasker) {
        self.send_in_order(
            Channel::Tasker(host_id),
            SimEvent::Machine(host_id, Event::Tasker(message)),
        );
    }

    fn start_host(&mut self, start: StartId, plan: HostPlan) {
        let at = self.now + Micros(self.rng.below(300_000));
        let start_result = if plan.name.starts_with("bad") {
            Err((PvmError::CantStart, format!("no way to {}", plan.name)))
        } else {
            let mut config = machine_config(plan.id, &plan.name);
            config.starts_watcher = self.nodes[&HostId::MASTER].machine.config.starts_watcher;
            config.speed = plan.speed;
            self.boot_host(config);
            if !plan.name.starts_with("mute") {
                self.connect_hosts(HostId::MASTER, plan.id);
            }
            Ok(StartedHost {
                arch: "LINUX64".into(),
                dsig: DSIG_X86_64,
                addresses: vec![host_address(plan.id)],
            })
        };
        self.schedule(
            at,
            SimEvent::Machine(
                HostId::MASTER,
                Event::HostStarted {
                    start,
                    result: start_result,
                },
            ),
        );
    }

    pub(super) fn remove_program(&mut self, host_id: HostId, name: &'static str) {
        self.nodes
            .get_mut(&host_id)
            .expect("it is there")
            .world
            .missing_program = Some(name);
    }

    /// True if the host table of the master does not contain the host.
    fn is_host_removed(&self, host: HostId) -> bool {
        self.nodes[&HostId::MASTER]
            .machine
            .host_table()
            .get(host)
            .is_none()
    }

    fn add_process(
        &mut self,
        host_id: HostId,
        program: &str,
        spawned_tid: Option<Tid>,
        env: Vec<String>,
    ) -> usize {
        self.procs.push(Proc {
            host: host_id,
            program: program.to_string(),
            spawned_tid,
            namespace_pid: self.procs.len() as i32 + 50_000,
            env,
            on_daemon_exit: OnDaemonExit::Terminate,
            conn: None,
            welcome: None,
            refusal_reason: None,
            rm_info: None,
            links: BTreeMap::new(),
            route_number: 0,
            incarnation: 0,
            sent_counts: BTreeMap::new(),
            pending_requests: BTreeMap::new(),
            replies: BTreeMap::new(),
            next_request_number: 0,
            received: Vec::new(),
            daemon_messages: Vec::new(),
            deferred_notifications: Vec::new(),
            quiesce_request: None,
            stopped_for_migration: false,
            is_held: false,
            paused: false,
            pause_serial: 0,
            quiesce_runs: 0,
            deferred_events: Vec::new(),
            claim: None,
            handoff_migration: None,
            was_exit_requested: false,
            exit_status: None,
            exited: false,
            images_remain: false,
            cpu_micros: 0,
            answers_pings: false,
            past: Past::default(),
            answers_marks: false,
            child_holds_socket: false,
        });
        self.procs.len() - 1
    }

    /// Connects a process to the daemon of its host and sends its claim.
    pub(super) fn connect(&mut self, proc: usize, claim: Claim) -> ConnId {
        self.next_conn += 1;
        let conn = ConnId(self.next_conn);
        let host_id = self.procs[proc].host;
        self.procs[proc].conn = Some(conn);
        self.procs_by_conn.insert(conn, proc);
        let pid = proc as i32 + 100;
        self.send_from_proc(conn, host_id, Event::TaskConnected { conn, pid });
        let program = self.procs[proc].program.clone();
        let on_daemon_exit = self.procs[proc].on_daemon_exit;
        let hello = Hello {
            magic: TASK_MAGIC,
            version: WIRE_VERSION,
            claim,
            namespace_pid: self.procs[proc].namespace_pid,
            program,
            on_daemon_exit,
        };
        self.send_from_proc(
            conn,
            host_id,
            Event::TaskControl {
                conn,
                message: ToDaemon::Hello(hello),
            },
        );
        conn
    }

    /// Delays everything that a process sends by at least `delay`. This models a daemon that is
    /// busy with other tasks.
    pub(super) fn delay_proc(&mut self, proc: usize, delay: Micros) {
        let conn = self.procs[proc].conn.expect("connected");
        let earliest_arrival = self
            .last_arrivals
            .entry(Channel::FromProc(conn))
            .or_default();
        *earliest_arrival = (self.now + delay).max(*earliest_arrival);
    }

    pub(super) fn send_from_proc(&mut self, conn: ConnId, host_id: HostId, event: Event) {
        self.send_in_order(Channel::FromProc(conn), SimEvent::Machine(host_id, event));
    }

    /// Starts a process as from a command line and waits until it has enrolled. Returns the
    /// process.
    pub(super) fn enrol(&mut self, host_id: HostId) -> usize {
        self.enrol_with(host_id, OnDaemonExit::Terminate)
    }

    /// Starts a process as [`Sim::enrol`] does. `on_daemon_exit` is the process's choice for the
    /// end of its daemon.
    pub(super) fn enrol_with(&mut self, host_id: HostId, on_daemon_exit: OnDaemonExit) -> usize {
        let proc = self.add_process(host_id, "cmd", None, vec![]);
        self.procs[proc].on_daemon_exit = on_daemon_exit;
        self.connect(proc, Claim::NotSpawned);
        self.run_until("accepted", |sim| sim.procs[proc].welcome.is_some());
        proc
    }

    /// Starts a process that presents a claim. Does not wait for the answer.
    pub(super) fn start_with_claim(&mut self, host_id: HostId, claim: Claim) -> usize {
        let proc = self.add_process(host_id, "claimer", None, vec![]);
        self.connect(proc, claim);
        proc
    }

    pub(super) fn close_connection(&mut self, proc: usize) {
        if let Some(conn) = self.procs[proc].conn.take() {
            let host_id = self.procs[proc].host;
            self.send_from_proc(
                conn,
                host_id,
                Event::TaskClosed {
                    conn,
                    protocol_error: None,
                },
            );
        }
    }

    /// Sends a request and returns its number. `Proc::replies` will contain the reply.
    pub(super) fn request(&mut self, proc: usize, request: Request) -> RequestId {
        let p = &mut self.procs[proc];
        p.next_request_number += 1;
        let id = RequestId(p.next_request_number);
        let (conn, host_id) = (p.conn.expect("connected"), p.host);
        p.pending_requests.insert(id, request.clone());
        self.send_from_proc(
            conn,
            host_id,
            Event::TaskControl {
                conn,
                message: ToDaemon::Request { id, request },
            },
        );
        id
    }

    /// Sends a request and waits for its reply. Panics if no reply arrives.
    pub(super) fn ask(&mut self, proc: usize, request: Request) -> Reply {
        let request_text = format!("{request:?}");
        let request_id = self.request(proc, request);
        self.run_until(&request_text, |sim| {
            sim.procs[proc].replies.contains_key(&request_id)
        });
        self.procs[proc]
            .replies
            .remove(&request_id)
            .expect("just seen")
    }

    /// Sends a message over the link to another task.
    pub(super) fn send_message(&mut self, proc: usize, dst: Tid, body: &[u8]) {
        let p = &mut self.procs[proc];
        let (tid, route, is_connected) = (
            p.tid(),
            RouteId(p.route_number),
            p.conn.is_some() && p.quiesce_request.is_none(),
        );
        let (now, incarnation) = (self.now, p.incarnation);
        let link = p.links.entry(dst).or_insert_with(|| {
            let mut link = Link::new(tid, dst);
            link.begin_incarnation(incarnation, true);
            if is_connected {
                link.handle_event(now, LinkEvent::RouteUp(route));
            }
            link
        });
        link.send(Bytes::new(), Bytes::copy_from_slice(body))
            .expect("far from full");
        self.carry_out_link_outputs(proc);
    }

    // tidy: long because each kind of message has its arm.
    fn deliver_to_proc(&mut self, proc: usize, conn: ConnId, message: ToTask) {
        if self.procs[proc].conn != Some(conn) || self.procs[proc].exited {
            return;
        }
        let now = self.now;
        match message {
            ToTask::Welcome(welcome) => self.on_welcome(proc, welcome),
            ToTask::Refused { reason } => self.procs[proc].refusal_reason = Some(reason),
            ToTask::Reply { id, reply } => {
                self.procs[proc].pending_requests.remove(&id);
                assert!(
                    self.procs[proc].replies.insert(id, reply).is_none(),
                    "{id} got two replies"
                );
            }
            ToTask::Deliver { message, .. } if (message.ctx, message.tag) == (CTX_RM, TAG_PING) => {
                if self.procs[proc].answers_pings {
                    self.announce_alive(proc);
                }
            }
            ToTask::Deliver {
                message,
                deliver_after,
            } => {
                match deliver_after {
                    Some(watermark) => {
                        self.link_to(proc, watermark.peer);
                        self.procs[proc]
                            .deferred_notifications
                            .push((watermark, message));
                    }
                    None => self.procs[proc]
                        .received
                        .push(Received::Notification(message)),
                }
                self.carry_out_link_outputs(proc);
            }
            ToTask::PeerGone { tid } => {
                self.procs[proc].daemon_messages.push(message);
                self.link_to(proc, tid)
                    .handle_event(now, LinkEvent::PeerGone);
                self.carry_out_link_outputs(proc);
            }
            ToTask::PeerMigrated { tid } => {
                self.procs[proc].daemon_messages.push(message);
                self.link_to(proc, tid)
                    .handle_event(now, LinkEvent::PeerMigrated);
                self.carry_out_link_outputs(proc);
            }
            ToTask::RmChanged { rm } => self.procs[proc].rm_info = rm,
            ToTask::Route { .. } | ToTask::Past(_) => {
                self.procs[proc].daemon_messages.push(message);
            }
            ToTask::AwaitMarks { wait_number, .. } => {
                self.procs[proc].daemon_messages.push(message);
                if self.procs[proc].answers_marks {
                    let (host_id, message) = (
                        self.procs[proc].host,
                        ToDaemon::MarksArrived { wait_number },
                    );
                    self.send_from_proc(conn, host_id, Event::TaskControl { conn, message });
                }
            }
            ToTask::PrepareExit { migration: by } => self.prepare_exit(proc, by),
            ToTask::Quiesce {
                migration,
                token_paths,
            } => {
                let p = &mut self.procs[proc];
                assert!(p.quiesce_request.is_none(), "asked to quiesce twice");
                let watermarks = p
                    .links
                    .values()
                    .map(|l| SendWatermark {
                        peer: l.peer(),
                        end_seq: l.queued_end_seq(),
                    })
                    .collect();
                let host_id = p.host;
                p.quiesce_request = Some((migration, token_paths));
                let message = ToDaemon::Quiesced {
                    migration,
                    watermarks,
                    redirect_address: taskers::redirect_address(proc),
                };
                self.send_from_proc(conn, host_id, Event::TaskControl { conn, message });
                if !self.procs[proc].child_holds_socket {
                    self.close_connection(proc);
                }
                self.notify_links(proc, &LinkEvent::RouteDown);
            }
        }
    }

    /// Reconnects each quiesced process that runs and finds its resume token on its host.
    fn resume_by_tokens(&mut self) {
        for proc in 0..self.procs.len() {
            let p = &self.procs[proc];
            let Some((migration, paths)) = &p.quiesce_request else {
                continue;
            };
            if p.is_frozen() || p.exited || p.conn.is_some() {
                continue;
            }
            let token = paths
                .iter()
                .find_map(|path| self.resume_tokens.get(&(p.host, path.clone())));
            if token.is_some_and(|t| t.migration == *migration) {
                let claim = Claim::Resume {
                    tid: p.tid(),
                    migration: *migration,
                };
                self.connect(proc, claim);
            }
        }
    }

    /// Passes an event to a machine and carries out the outputs of the machine. Injects a planned
    /// message fault before or after that.
    pub(super) fn handle(&mut self, host_id: HostId, event: Event) {
        let message_name = self.counted_message_name(host_id, &event);
        self.reach_message_point(message_name.as_ref(), fault_injection::StepEdge::Start);
        self.handle_event(host_id, event);
        self.reach_message_point(message_name.as_ref(), fault_injection::StepEdge::End);
    }

    fn handle_event(&mut self, host_id: HostId, event: Event) {
        let Some(node) = self.nodes.get_mut(&host_id).filter(|n| n.is_alive) else {
            return;
        };
        if let Some(deferred_events) = &mut node.deferred_events {
            return deferred_events.push(event);
        }
        node.world.unix_time = self.now;
        node.is_tasker_dead &= !matches!(event, Event::TaskerEnded { .. });
        node.machine.handle_event(self.now, &mut node.world, event);
        self.carry_out_outputs(host_id);
    }

    /// Passes an event to a machine at a given time. Returns its outputs without carrying them out.
    pub(super) fn handle_without_outputs(
        &mut self,
        host_id: HostId,
        now: Micros,
        event: Event,
    ) -> Vec<Output> {
        let node = self.nodes.get_mut(&host_id).expect("there");
        node.machine.handle_event(now, &mut node.world, event);
        std::iter::from_fn(|| node.machine.next_output()).collect()
    }

    fn carry_out_outputs(&mut self, host_id: HostId) {
        let is_running = |n: &&mut Node| n.is_alive && n.deferred_events.is_none();
        while let Some(output) = self
            .nodes
            .get_mut(&host_id)
            .filter(is_running)
            .and_then(|n| n.machine.next_output())
        {
            self.carry_out(host_id, output);
        }
    }

    fn next_time(&self) -> Option<Micros> {
        let queue_time = self.queue.keys().next().map(|(at, _)| *at);
        let machine_times = self
            .nodes
            .values()
            .filter(|n| n.is_alive && n.deferred_events.is_none())
            .filter_map(|n| n.machine.next_wakeup_time());
        let live_procs = self
            .procs
            .iter()
            .filter(|p| !p.exited && !p.is_frozen() && p.conn.is_some());
        let link_times = live_procs.flat_map(|p| p.links.values().filter_map(Link::next_wakeup));
        machine_times.chain(link_times).chain(queue_time).min()
    }

    /// Handles the next event. Returns false if no event is left.
    pub(super) fn step(&mut self) -> bool {
        self.resume_by_tokens();
        let Some(next_time) = self.next_time() else {
            return false;
        };
        self.now = self.now.max(next_time);
        let due_event = self
            .queue
            .first_entry()
            .filter(|e| e.key().0 <= self.now)
            .map(|e| e.remove());
        self.dispatch(due_event);
        true
    }

    fn dispatch(&mut self, due_event: Option<SimEvent>) {
        let receiver_proc = match &due_event {
            Some(SimEvent::ToProc(proc, ..) | SimEvent::LinkToProc(proc, ..)) => Some(*proc),
            Some(SimEvent::CloseProc(conn)) => self.procs_by_conn.get(conn).copied(),
            _ => None,
        };
        if let Some(proc) = receiver_proc.filter(|proc| self.procs[*proc].is_frozen()) {
            return self.procs[proc].deferred_events.extend(due_event);
        }
        match due_event {
            Some(SimEvent::Machine(host_id, event)) => self.handle(host_id, event),
            Some(SimEvent::DataItem(channel_id, item)) => {
                self.data_channels
                    .receive_item(channel_id, item)
                    .into_iter()
                    .for_each(|event| self.handle(channel_id.1, event));
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
                    self.link_to(proc, frame.src)
                        .handle_event(now, LinkEvent::Frame(frame));
                    self.carry_out_link_outputs(proc);
                }
            }
            Some(SimEvent::CloseProc(conn)) => {
                if let Some(proc) = self
                    .procs_by_conn
                    .get(&conn)
                    .copied()
                    .filter(|p| self.procs[*p].conn == Some(conn))
                {
                    self.close_connection(proc);
                }
            }
            Some(SimEvent::LossDetected(observer, lost_host)) => {
                self.handle(
                    observer,
                    Event::HostLost {
                        host: lost_host,
                        why: "silence".into(),
                    },
                );
            }
            Some(SimEvent::Reconnection(a, b)) => self.connect_hosts(a, b),
            Some(SimEvent::LeaseCheck(host_id)) => self.check_tasker_lease(host_id),
            Some(SimEvent::VictimResumption(victim)) => self.resume_victim(victim),
            Some(SimEvent::MemoryTransferEnd(host_id, migration, source_host, tid)) => {
                self.end_memory_transfer(host_id, migration, source_host, tid)
            }
            Some(SimEvent::PauseDue(host_id, proc, pause_serial)) => {
                self.pause_now(host_id, proc, pause_serial)
            }
            None => self.wake_all(),
        }
    }

    fn wake_all(&mut self) {
        let now = self.now;
        let is_due = |n: &Node| {
            n.is_alive
                && n.deferred_events.is_none()
                && n.machine.next_wakeup_time().is_some_and(|at| at <= now)
        };
        let due_hosts: Vec<HostId> = self
            .nodes
            .iter()
            .filter(|(_, n)| is_due(n))
            .map(|(host_id, _)| *host_id)
            .collect();
        for host_id in due_hosts {
            self.handle(host_id, Event::Wake);
        }
        for proc in 0..self.procs.len() {
            let p = &mut self.procs[proc];
            if !p.exited && !p.is_frozen() && p.conn.is_some() {
                p.links
                    .values_mut()
                    .filter(|l| l.next_wakeup().is_some_and(|at| at <= now))
                    .for_each(|l| {
                        l.handle_event(now, LinkEvent::Wake);
                    });
                self.carry_out_link_outputs(proc);
            }
        }
    }

    /// Runs until the condition holds. Panics with the logs if the queue is empty or
    /// [`STUCK_TIMEOUT`] has passed; `condition_name` is the condition in the message.
    pub(super) fn run_until(&mut self, condition_name: &str, condition: impl Fn(&Self) -> bool) {
        let deadline = self.now + STUCK_TIMEOUT;
        while !condition(self) {
            if self.now > deadline || !self.step() {
                let logs: Vec<String> = self
                    .nodes
                    .iter()
                    .map(|(id, n)| format!("{id}:\n  {}", n.log.join("\n  ")))
                    .collect();
                panic!(
                    "never happened: {condition_name} (seed {})\n{}\n{}",
                    self.seed,
                    logs.join("\n"),
                    self.state_report()
                );
            }
        }
    }

    /// Returns the event log and the state of all processes, for the panic message of a failed run.
    pub(super) fn state_report(&self) -> String {
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
        let procs = self.procs.iter().enumerate().map(|(index, p)| {
            let Proc { host, spawned_tid, conn, quiesce_request, stopped_for_migration, exited, .. } = p;
            let spawned_tid = spawned_tid.map_or("-".into(), |t| t.to_string());
            format!("process {index} {spawned_tid} on {host}: {conn:?} quiesced {quiesce_request:?} stopped {stopped_for_migration} exited {exited}")
        });
        events.chain(procs).collect::<Vec<_>>().join("\n")
    }

    /// Returns the number of resume tokens on live hosts.
    pub(super) fn resume_token_count(&self) -> usize {
        self.resume_tokens
            .keys()
            .filter(|(host_id, _)| self.nodes[host_id].is_alive)
            .count()
    }

    /// Advances the time by `duration` and handles all events that are due until the new time.
    pub(super) fn advance(&mut self, duration: Micros) {
        let end = self.now + duration;
        while self.next_time().is_some_and(|at| at <= end) {
            self.step();
        }
        self.now = self.now.max(end);
    }
}
