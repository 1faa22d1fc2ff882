//! The state machine of a PVM daemon. It contains no socket, file, clock or randomness: all input
//! arrives as an [`Event`], and every effect is an [`Output`].
//!
//! The shell (crate `pvmd`) drives the machine in a loop:
//!
//! 1. The shell passes an event and the current time to [`Machine::handle_event`]. The machine
//!    calls the [`World`] for questions that need an immediate answer.
//! 2. The shell removes [`Output`]s with [`Machine::next_output`] until there are none, and
//!    performs them in that order.
//! 3. At the time of [`Machine::next_wakeup_time`] the shell passes [`Event::Wake`].
//!
//! Every module implements a part of [`Machine`]:
//!
//! | Modules | Part |
//! | --- | --- |
//! | `task_connections`, `tasks`, `requests` | connections of tasks, the task table, requests of tasks |
//! | `routing`, `notify`, `output` | delivery of link frames, items, notifications and output |
//! | `ring_peers` | direct routes between two tasks of this host |
//! | `hosts`, `hostfile` | adding hosts to the host table and removing them (master) |
//! | `host_table`, `halt` | every daemon's part in the host table and in a shutdown |
//! | `rpc` | requests between daemons |
//! | `lease`, `supervision` | heartbeats, and how long tasks may run without them; programs that hang |
//! | `spawn`, `rm`, `service_tasks` | starting tasks, resource managers, hosters, taskers and tracers |
//! | `mailbox`, `groups`, `events` | state that the master keeps for the virtual machine |
//! | `guests`, `guest_stops`, `suspension` | pausing tasks for the owner of this host, or on request |
//! | `owner_agent` | owner agents, the load watcher of this host, directives of dead agents |
//! | `checkpoints` | checkpoints of jobs, and restarts from them |
//! | `vm_summary` | what every host keeps for the case that the master is lost |
//! | `restart_engine` | migration without CRIU: the program exits and is started again |
//! | `migrations`, `relocation` | adapter to the migration protocol, message order during migrations |

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        clippy::disallowed_types,
        reason = "the simulator reads its seed count and starts its clock"
    )
)]

mod checkpoints;
mod debug_query;
mod deferred;
mod events;
pub mod groups;
mod guest_stops;
mod guests;
mod halt;
mod handoff_log;
mod host_reports;
mod host_table;
mod hostfile;
mod hosts;
pub mod io;
mod lease;
mod leftovers;
mod library_faults;
mod mailbox;
mod migrations;
mod notify;
mod output;
mod owner_agent;
#[allow(missing_docs)]
pub mod pair_streams;
mod placement_query;
mod relocation;
mod requests;
mod restart_engine;
mod ring_peers;
mod rm;
mod rm_batching;
mod routing;
mod rpc;
mod service_order;
mod service_tasks;
mod spawn;
mod supervision;
mod suspension;
mod task_connections;
mod task_trace;
mod tasks;
#[cfg(test)]
mod tests;
mod vm_summary;

pub use checkpoints::{COPIES_MAX, CopyPolicy};
pub use hostfile::master_plan;
pub use io::{ConnId, Event, HostPlan, Output, StartId, StartedHost, World};

use checkpoint_protocol::{SourceEvent, TargetEvent};
use sempa_proto::checkpoint::CopyFailure;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Failure;
use sempa_proto::runtime_paths::RuntimePaths;
use sempa_proto::table::{HostEntry, HostTable};
use sempa_proto::tasker::{EngineUnavailable, FreezerUnavailable, FromTasker, ToTasker};
use sempa_proto::{Epoch, HostId, Micros, MigrationId, Tid};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

/// Configuration of a daemon. It does not change while the daemon runs.
#[derive(Clone, Debug)]
pub struct MachineConfig {
    /// Index of this host; the master is [`HostId::MASTER`].
    pub host: HostId,
    pub host_name: String,
    pub vm_name: String,
    /// PVM architecture name of this host.
    pub arch: String,
    /// PVM data signature. Hosts with the same value share a data representation.
    pub dsig: i32,
    /// Addresses on which the daemon listens for other daemons.
    pub addresses: Vec<SocketAddr>,
    /// True if the libraries of this host's tasks may set up direct routes on their own.
    pub allows_automatic_routes: bool,
    /// Relative speed; the default is 1000.
    pub speed: i32,
    /// User id under which the tasks of this host run.
    pub uid: u32,
    /// Duration of silence after which a host is lost. Time limits for answers of hosts that may be
    /// lost are multiples of the lease.
    pub lease: Micros,
    /// Command that starts the resource manager, split into words (master only).
    pub rm_command: Option<Vec<String>>,
    /// Commands that start a tasker, a tracer and a hoster, split into words.
    pub server_commands: Vec<Vec<String>>,
    /// True if this daemon starts a load watcher, which stops guests for the owner of this host
    /// also without a resource manager.
    pub starts_watcher: bool,
    /// Paths of the daemon's socket and files.
    pub paths: RuntimePaths,
    pub hostfile_lines: Vec<String>,
    /// Highest task number of each host that occurs in a checkpoint. New tasks get higher numbers
    /// (master only).
    pub reserved_ids_max: BTreeMap<HostId, u32>,
    /// Hosts to which checkpoints are copied (master only).
    pub copy_policy: CopyPolicy,
    /// Directory of the checkpoint store, for the summary; empty if there is none (master only).
    pub store_dir: String,
}

/// Action of a timer. Timers are never cancelled, so each handler first checks whether its action
/// is still necessary.
#[derive(Clone, Copy, Debug)]
enum Timer {
    /// The start of a daemon has timed out.
    HostStartTimeout(StartId),
    /// The started hosts of this request to add hosts no longer wait for the others.
    JoinReadyHosts(u64),
    /// The time limit for a deleted host to end its tasks has passed.
    HostRemovalTimeout(HostId),
    /// The grace period of tasks that were asked to exit is over.
    ExitGraceTimeout,
    /// This daemon must exit, even if tasks or hosts remain.
    DaemonStopTimeout,
    /// A process has exited, but its connection is still open, and the time limit to read the rest
    /// of its messages has passed. The number is the spawn token of the process.
    SocketDrainTimeout(Tid, Option<i32>),
    /// The time limit for a program to exit for this migration has passed.
    ExitTimeout(Tid, MigrationId),
    /// The time limit for a task's library to report its link states for this migration has passed.
    /// Without the link states the daemon does not ask the program to exit.
    HandoffTimeout(Tid, MigrationId),
    /// A program was asked to exit for this migration, which was aborted, and the time in which the
    /// program may still exit and be started again has passed. Any later exit of the program ends
    /// the task.
    LateExitTimeout(Tid, MigrationId),
    /// The time limit of a dump to wait for exit notices of other tasks has passed. The id is that
    /// of the dumped task's part of a snapshot.
    ExitNoticeTimeout(Tid, MigrationId),
    /// Guests may be due for eviction.
    EvictionDue,
    /// Guests that were asked to exit must be killed.
    GuestKillDue,
    /// The time has passed for which the last directive of an owner agent applies after the agent's
    /// death.
    OwnerDirectiveExpiry(Tid),
    /// The load watcher of this host has died. A new one is started if this host still has none.
    WatcherRestart,
    /// The time limit for a load watcher of this daemon to begin to watch has passed.
    WatcherStartTimeout(Tid),
    /// There has been no resource manager for a long time: preempted tasks resume.
    PreemptionExpiry,
    /// Batched reports to the resource manager are due.
    RmBatchDue,
    /// A placement query has timed out.
    PlacementQueryTimeout(u64),
    /// A job is due for its next checkpoint, for a retry of a checkpoint, or for a check whether
    /// its last tasks have ended.
    JobCheckDue(Tid),
    /// The master must check whether the tasks have ended whose jobs' claims must be released.
    ClaimCheckDue,
    /// No task of a lost host can run any more: this restart can begin.
    RestartDue(u64),
    /// The time limit for the receiver of a failed checkpoint copy to report the reason has passed.
    CopyFailureTimeout(MigrationId),
    /// The time limit for the last messages of `exited` to arrive at `watcher` has passed.
    LastMessagesTimeout { watcher: Tid, exited: Tid },
    /// The time is over for which a signal waits for messages.
    WaitingSignal(u64),
    /// The next heartbeat is due.
    HeartbeatDue,
    /// The programs on which promises depend must be checked.
    PartnerCheck,
    /// The time limit of the tasker to confirm that guests are stopped has passed.
    GuestStopTimeout,
    /// The master must send a new summary of the virtual machine to all hosts.
    SummaryDue,
}

/// State that only the master has.
#[derive(Debug, Default)]
struct Master {
    host_changes: hosts::HostChanges,
    mailbox: mailbox::Mailbox,
    groups: groups::Groups,
    service_pasts: service_order::ServicePasts,
    events: events::EventLog,
    migrations: migrations::CoordinatedMigrations,
    checkpoints: checkpoints::JobCheckpoints,
    known_state: vm_summary::KnownState,
}

/// State machine of one daemon.
#[derive(Debug)]
pub struct Machine {
    config: MachineConfig,
    now: Micros,
    /// Time of day at which the current event is handled.
    unix_time: Micros,
    outputs: VecDeque<Output>,
    timers: BTreeMap<(Micros, u64), Timer>,
    last_timer_number: u64,
    conns: task_connections::TaskConnections,
    tasks: tasks::Tasks,
    /// Owner of each message context that this daemon has allocated, by context.
    context_owners: BTreeMap<i32, Tid>,
    last_context: u32,
    table: HostTable,
    prepared_table: Option<HostTable>,
    /// Epoch of the newest order of the master. Orders with an older epoch are refused.
    epoch: Epoch,
    locations: routing::Locations,
    ring_peers: ring_peers::RingPeers,
    waiting_signals: service_order::WaitingSignals,
    rpcs: rpc::OpenRequests,
    lease: lease::Lease,
    supervision: supervision::Supervision,
    scatter_gathers: requests::ScatterGathers,
    spawns: spawn::PendingSpawns,
    pending_execs: VecDeque<spawn::ExecJob>,
    pending_reports: host_reports::PendingReports,
    world_calls: restart_engine::WorldCalls,
    tasker_has_ended: bool,
    /// `Ok` if the tasker pauses guests by the cgroup freezer, otherwise the reason why the tasker
    /// cannot use the freezer; `None` until the tasker has reported this.
    freezer_support: Option<Result<(), FreezerUnavailable>>,
    /// Version of the dump engine, or the reason why no task of this host can be dumped; `None`
    /// until the tasker has reported this.
    engine: Option<Result<String, EngineUnavailable>>,
    service_use: io::ServiceUse,
    /// Capabilities that the tasker needs as root and lacks.
    missing_capabilities: Vec<String>,
    rm_state: rm::RmState,
    service_tasks: service_tasks::ServiceTasks,
    migrations: migrations::LocalMigrations,
    /// Transfer id and name of the checkpoint whose copy is being received from the master.
    incoming_checkpoint_copy: Option<(MigrationId, String)>,
    rm_batch: rm_batching::RmBatch,
    deferred_actions: deferred::DeferredActions,
    owner_control: guests::OwnerControl,
    forwarded_suspend_orders: suspension::ForwardedOrders,
    placement_queries: placement_query::PlacementQueries,
    shutdown: Option<halt::ShutdownState>,
    /// Debug mask that a task has set with `pvm_tickle`. Queries return it; it has no other effect.
    debug_mask: i32,
    informed_tracers: task_trace::InformedTracers,
    master: Option<Box<Master>>,
}

impl Machine {
    /// Creates the machine of a daemon that has just started. The master's host table contains the
    /// master itself; a slave's is empty until the slave has joined.
    pub fn new(config: MachineConfig, now: Micros) -> Self {
        let mut machine = Self {
            now,
            unix_time: Micros::default(),
            outputs: VecDeque::new(),
            timers: BTreeMap::new(),
            last_timer_number: 0,
            conns: task_connections::TaskConnections::default(),
            tasks: tasks::Tasks::default(),
            context_owners: BTreeMap::new(),
            last_context: 0,
            table: HostTable::default(),
            prepared_table: None,
            epoch: Epoch::default(),
            locations: routing::Locations::default(),
            ring_peers: ring_peers::RingPeers::default(),
            waiting_signals: service_order::WaitingSignals::default(),
            rpcs: rpc::OpenRequests::default(),
            lease: lease::Lease::default(),
            supervision: supervision::Supervision::default(),
            scatter_gathers: requests::ScatterGathers::default(),
            spawns: spawn::PendingSpawns::default(),
            pending_execs: VecDeque::new(),
            pending_reports: host_reports::PendingReports::default(),
            world_calls: restart_engine::WorldCalls::new(),
            tasker_has_ended: false,
            freezer_support: None,
            engine: None,
            service_use: io::ServiceUse::default(),
            missing_capabilities: Vec::new(),
            rm_state: rm::RmState::default(),
            service_tasks: service_tasks::ServiceTasks::default(),
            migrations: migrations::LocalMigrations::default(),
            incoming_checkpoint_copy: None,
            rm_batch: rm_batching::RmBatch::default(),
            deferred_actions: deferred::DeferredActions::default(),
            owner_control: guests::OwnerControl::default(),
            forwarded_suspend_orders: suspension::ForwardedOrders::default(),
            placement_queries: placement_query::PlacementQueries::default(),
            shutdown: None,
            debug_mask: 0,
            informed_tracers: task_trace::InformedTracers::default(),
            master: None,
            config,
        };
        if machine.config.host == HostId::MASTER {
            machine.bootstrap_master();
        }
        machine
    }

    /// Creates the virtual machine on the master: a host table that contains only the master, and
    /// the list of hosts to start from the host file.
    fn bootstrap_master(&mut self) {
        let lines = std::mem::take(&mut self.config.hostfile_lines);
        let (host_file, hosts_to_start, invalid_lines) =
            hostfile::HostFile::parse_lines(&lines, &self.config.host_name);
        let speed = host_file
            .options_of(&self.config.host_name)
            .speed
            .unwrap_or(self.config.speed);
        let host_file_start = (!lines.is_empty()).then_some(hosts::HostFileStart {
            host_names: hosts_to_start,
            invalid_lines,
        });
        self.master = Some(Box::new(Master {
            host_changes: hosts::HostChanges::new(host_file, host_file_start),
            ..Master::default()
        }));
        let reserved_ids_max = self.reserved_ids_max_of(self.config.host);
        self.tasks.reserve_ids_up_to(reserved_ids_max);
        let config = &self.config;
        let entry = HostEntry {
            id: config.host,
            name: config.host_name.clone(),
            arch: config.arch.clone(),
            speed,
            dsig: config.dsig,
            addresses: config.addresses.clone(),
        };
        self.table = HostTable {
            epoch: self.next_epoch(),
            hosts: vec![entry],
        };
        self.start_heartbeats();
    }

    /// Handles an event and all timers that are due. `now` is monotonic, includes the time for
    /// which the machine sleeps, and is the clock of the tasker's leases. The effects are returned
    /// by [`Machine::next_output`].
    pub fn handle_event(&mut self, now: Micros, world: &mut dyn World, event: Event) {
        self.now = now;
        self.unix_time = world.unix_time();
        self.run_deferred_actions();
        if let Some(master) = &mut self.master {
            master.checkpoints.set_creation_time(self.unix_time);
        }
        self.process_host_file();
        self.dispatch_event(event);
        self.run_timers();
        loop {
            if self.run_protocol_outputs()
                || self.run_world_call(world)
                || self.send_pending_report(world)
            {
                continue;
            }
            let Some(job) = self.pending_execs.pop_front() else {
                break;
            };
            self.start_tasks(world, job);
        }
    }

    fn dispatch_event(&mut self, event: Event) {
        match event {
            Event::TaskConnected { conn, pid } => self.handle_task_connected(conn, pid),
            Event::TaskControl { conn, message } => self.handle_task_control(conn, message),
            Event::TaskRoute {
                conn,
                dst,
                message,
                descriptors,
            } => self.forward_route_message(conn, dst, message, descriptors),
            Event::TaskLink { conn, frame } => self.handle_link_frame(conn, frame),
            Event::TaskClosed {
                conn,
                protocol_error,
            } => self.handle_task_closed(conn, protocol_error),
            Event::HostConnected { host } => {
                self.start_heartbeats_to(host);
                self.handle_host_connected(host)
            }
            Event::HostControl { host, message } => self.handle_host_message(host, message),
            Event::HostData { host, message } => self.handle_data_message(host, message),
            Event::HostLost { host, why } => self.handle_host_lost(host, &why),
            Event::HostStarted { start, result } => self.handle_host_started(start, result),
            Event::HostsPrepared { orders } => self.send_starts_to_hoster(orders),
            Event::TaskerStarted { service_use } => self.service_use = service_use,
            Event::Tasker(message) => self.handle_tasker_message(message),
            Event::TaskerEnded { why } => self.handle_tasker_exit(&why),
            Event::ImagesSent { migration, result } => {
                self.handle_images_sent(migration, result.map(|_| ()))
            }
            Event::ImagesReceived { migration, result } => {
                self.handle_images_received(migration, result)
            }
            Event::CheckpointBegun { snapshot, result } => {
                self.handle_checkpoint_begun(snapshot, result)
            }
            Event::PartStored { migration, result } => self.handle_part_stored(migration, result),
            Event::CheckpointSealed { snapshot, result } => {
                self.handle_checkpoint_sealed(snapshot, result)
            }
            Event::CheckpointOpened {
                restart_number: restart,
                result,
            } => self.handle_checkpoint_opened(restart, result),
            Event::JobTakenOver { key, by } => self.end_taken_over_job(key, &by),
            Event::CheckpointDamaged {
                restart_number,
                why,
                is_missing,
            } => self.handle_checkpoint_damaged(restart_number, why, is_missing),
            Event::OlderCheckpointFound {
                job,
                damaged_checkpoint,
                why,
                result,
            } => self.handle_older_checkpoint(job, damaged_checkpoint, why, result),
            Event::PartRead { migration, result } => self.handle_part_read(migration, result),
            Event::StateCollected { migration, result } => {
                self.handle_state_collected(migration, result)
            }
            Event::StateStaged { migration, result } => self.handle_state_staged(migration, result),
            Event::StateInstalled { migration, result } => {
                self.handle_state_installed(migration, result)
            }
            Event::CheckpointsListed { tid, id, result } => {
                self.handle_checkpoints_listed(tid, id, result)
            }
            Event::CheckpointsRemoved { tid, id, result } => {
                self.handle_checkpoints_removed(tid, id, result)
            }
            Event::CheckpointsExpired { checkpoints } => {
                self.handle_checkpoints_expired(checkpoints)
            }
            Event::MemoryLost { migration, why } => self.send_to_tasker(ToTasker::MemoryLost {
                migration,
                reason: why,
            }),
            Event::MigrationRecorded { migration, result } => {
                self.handle_commit_recorded(migration, result)
            }
            Event::UnauthenticatedPeer { text } => {
                self.log_warning_and_record(text);
            }
            Event::ForeignLibrary { spawn_token, fault } => {
                self.handle_foreign_library(spawn_token, fault)
            }
            Event::Wake => {}
            Event::Stop { why } => self.handle_stop_request(&why),
        }
    }

    /// Passes the end of an outgoing transfer to the checkpoint part, the checkpoint copy, or the
    /// migration whose images were sent.
    fn handle_images_sent(&mut self, migration: MigrationId, result: Result<(), Failure>) {
        if self.migrations.uploading_parts.contains(&migration) {
            self.handle_part_uploaded(migration, result);
        } else if self.is_part_in_transfer(migration) {
            self.handle_part_sent(migration, result);
        } else if self.is_outgoing_copy(migration) {
            self.handle_copy_sent(migration, result.map_err(|e| CopyFailure(e.to_string())));
        } else {
            self.pass_to_source(migration, SourceEvent::ImagesSent(result));
        }
    }

    /// Passes the end of an incoming transfer, with its number of bytes, to the checkpoint part,
    /// the checkpoint copy, or the migration whose images were received.
    fn handle_images_received(&mut self, migration: MigrationId, result: Result<u64, Failure>) {
        if self.is_snapshot_part(migration) {
            self.handle_part_received(migration, result.map(|_| ()));
        } else if self.is_incoming_copy(migration) {
            let result = result.map(|_| ());
            self.handle_copy_received(migration, result.map_err(|e| CopyFailure(e.to_string())));
        } else {
            self.pass_to_target(migration, TargetEvent::ImagesReceived(result));
        }
    }

    fn handle_tasker_message(&mut self, message: FromTasker) {
        match message {
            FromTasker::Ready(capabilities) => {
                // The tasker reports its capabilities again when its engine probe has more results.
                let is_new_tasker = std::mem::replace(&mut self.tasker_has_ended, false)
                    || self.freezer_support.is_none();
                match &capabilities.engine_version {
                    Ok(version) => self.log(format!("tasks can be migrated: engine {version}")),
                    Err(why) => self.log_warning(format!("tasks cannot be migrated: {why}")),
                }
                match &capabilities.freezer {
                    Ok(()) => self.log("guests are paused by the cgroup freezer".into()),
                    Err(why) => self.log(format!(
                        "guests are paused by signals, not by the cgroup freezer: {why}"
                    )),
                }
                self.freezer_support = Some(capabilities.freezer);
                self.engine = Some(capabilities.engine_version);
                self.missing_capabilities = capabilities.missing_capabilities;
                // A slave that has not joined the virtual machine starts its commands when it
                // joins.
                if is_new_tasker && !self.table.hosts.is_empty() {
                    self.start_commands();
                }
            }
            FromTasker::Started {
                tid,
                pid,
                namespace_pid,
            } => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.pid = pid;
                    // The process that has connected may be a child of the one that was started.
                    if task.namespace_pid == 0 {
                        task.namespace_pid = namespace_pid;
                    }
                }
            }
            FromTasker::ExitExpected { tid } => self.send_exit_message(tid),
            FromTasker::ExitNotRequested { tid, reason: why } => {
                self.handle_exit_not_requested(tid, why)
            }
            FromTasker::StartFailed { tid, reason: why } => self.handle_start_failure(tid, &why),
            FromTasker::Output { tid, bytes } => self.forward_task_output(tid, bytes),
            FromTasker::Paused { tid } => self.handle_guest_paused(tid),
            FromTasker::LeaseRenewed { frozen_time } => self.handle_lease_renewed(frozen_time),
            // The shell adds the reason to the report that the tasker has ended.
            FromTasker::LeaseExpired { .. } => {}
            FromTasker::Pong => self.forget_tasker_question(),
            FromTasker::LeftBehind {
                tid,
                process_count,
                pids,
            } => self.handle_left_behind(tid, process_count, pids),
            FromTasker::LeftoversStopped { tid } => self.handle_leftovers_stopped(tid),
            FromTasker::NotStopped { tid, pids } => self.handle_not_stopped(tid, pids),
            FromTasker::KilledForLimit {
                tid,
                has_ended,
                limit,
            } => self.record_limit_kill(tid, has_ended, &limit),
            FromTasker::QueryInspected {
                query: query_id,
                result,
            } => self.handle_tasker_inspection(query_id, result),
            FromTasker::QueryVerdict {
                query: query_id,
                verdict,
            } => self.handle_tasker_verdict(query_id, verdict),
            FromTasker::Exited { tid, status, usage } => {
                self.handle_process_exit(tid, status, usage)
            }
            message => self.handle_tasker_migration_message(message),
        }
    }

    /// Handles the end of the tasker. Ends all tasks that the tasker had started, because these
    /// tasks died with the tasker, and fails the migrations to this host. No task can be started on
    /// this host until there is a new tasker.
    fn handle_tasker_exit(&mut self, why: &str) {
        self.tasker_has_ended = true;
        self.forget_tasker_question();
        if self.shutdown.is_none() {
            let text = format!("the tasker has ended ({why}); its tasks on this host were killed");
            self.log_line(io::LogLevel::Error, None, text);
            self.record_event(EventKind::TaskerGone {
                host: self.config.host,
                why: why.to_string(),
            });
        }
        let dead_tasks = self
            .tasks
            .live_tasks
            .values()
            .filter(|t| t.is_spawned())
            .map(|t| (t.tid, t.earlier_usage));
        for (tid, usage) in dead_tasks.collect::<Vec<_>>() {
            self.end_task(tid, 9, usage);
        }
        self.forget_leftovers();
        self.fail_incoming_migrations(why);
        self.fail_tasker_requests();
        self.advance_stop();
    }

    fn set_timer(&mut self, delay: Micros, timer: Timer) {
        self.last_timer_number += 1;
        self.timers
            .insert((self.now + delay, self.last_timer_number), timer);
    }

    fn run_timers(&mut self) {
        while let Some(timer_entry) = self.timers.first_entry()
            && timer_entry.key().0 <= self.now
        {
            match timer_entry.remove() {
                Timer::HostStartTimeout(start_id) => self.handle_start_timeout(start_id),
                Timer::JoinReadyHosts(request_number) => self.join_ready_hosts(request_number),
                Timer::HostRemovalTimeout(host) => self.handle_removal_timeout(host),
                Timer::ExitGraceTimeout => self.kill_remaining_tasks(),
                Timer::DaemonStopTimeout => self.handle_stop_timeout(),
                Timer::HandoffTimeout(tid, migration) => {
                    self.handle_handoff_timeout(tid, migration)
                }
                Timer::LateExitTimeout(tid, migration) => {
                    self.handle_late_exit_timeout(tid, migration)
                }
                Timer::ExitTimeout(tid, migration) => self.handle_exit_timeout(tid, migration),
                Timer::ExitNoticeTimeout(tid, migration) => {
                    self.stop_awaiting_exits(tid, migration)
                }
                Timer::EvictionDue => self.evict_guests(),
                Timer::GuestKillDue => self.kill_evicted_guests(),
                Timer::OwnerDirectiveExpiry(tid) => self.handle_owner_agent_expiry(tid),
                Timer::WatcherRestart => self.ensure_watcher(),
                Timer::WatcherStartTimeout(tid) => self.handle_watcher_start_timeout(tid),
                Timer::PreemptionExpiry => self.end_expired_preemptions(),
                Timer::RmBatchDue => self.handle_rm_batch_timer(),
                Timer::PlacementQueryTimeout(query) => self.handle_placement_query_timeout(query),
                Timer::JobCheckDue(job) => self.handle_job_timer(job),
                Timer::ClaimCheckDue => self.check_unreleased_claims(),
                Timer::RestartDue(restart_number) => self.retry_begin_restart(restart_number),
                Timer::CopyFailureTimeout(migration) => self.fail_broken_copy(migration),
                Timer::SocketDrainTimeout(tid, spawn_token) => {
                    self.handle_socket_drain_timeout(tid, spawn_token)
                }
                Timer::WaitingSignal(wait_number) => self.send_waiting_signal(wait_number),
                Timer::LastMessagesTimeout {
                    watcher,
                    exited: exited_task,
                } => self.handle_last_messages_timeout(watcher, exited_task),
                Timer::HeartbeatDue => self.send_heartbeat(),
                Timer::PartnerCheck => self.check_partners(),
                Timer::GuestStopTimeout => self.handle_guest_stop_timeout(),
                Timer::SummaryDue => self.send_summary(),
            }
        }
        let now = self.now;
        let Some(master) = &mut self.master else {
            return;
        };
        if master
            .migrations
            .coordinator
            .next_deadline()
            .is_some_and(|deadline| deadline <= now)
        {
            master.migrations.coordinator.on_timer(now);
        }
        master.checkpoints.snapshots.on_timer(now);
        master.checkpoints.restarts.on_timer(now);
    }

    /// Returns the next effect to carry out; `None` if there is none.
    pub fn next_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns the time at which [`Event::Wake`] is needed; `None` if nothing is due.
    pub fn next_wakeup_time(&self) -> Option<Micros> {
        let migration_deadline = self
            .master
            .as_ref()
            .and_then(|m| m.migrations.coordinator.next_deadline());
        let timer_deadline = self.timers.keys().next().map(|(deadline, _)| *deadline);
        let checkpoint_deadline = self
            .master
            .as_ref()
            .and_then(|m| m.checkpoints.next_deadline());
        timer_deadline
            .into_iter()
            .chain(migration_deadline)
            .chain(checkpoint_deadline)
            .chain(self.deferred_actions.due_time())
            .min()
    }

    /// Returns the host table in force. The table of a slave that has not joined yet is empty.
    pub fn host_table(&self) -> &HostTable {
        &self.table
    }
}
