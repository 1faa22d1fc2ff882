//! The state machine of a PVM daemon. It contains no socket, file, clock or randomness: all input
//! arrives as an [`Event`], and every effect is an [`Output`].
//!
//! The shell (crate `pvmd`) drives it in a loop:
//!
//! 1. It passes an event and the current time to [`Machine::handle`]. The machine puts questions
//!    that need an immediate answer to the [`World`].
//! 2. It takes [`Output`]s from [`Machine::poll`] until there are none, and carries them out in
//!    that order.
//! 3. At the time of [`Machine::next_wakeup`] it passes [`Event::Wake`].
//!
//! Every module implements a part of [`Machine`]:
//!
//! | Modules | Part |
//! | --- | --- |
//! | `local`, `tasks`, `requests` | connections of tasks, the task table, requests of tasks |
//! | `route`, `notify`, `output` | delivery of link frames, items, notifications and output |
//! | `pairs` | direct routes between two tasks of this host |
//! | `hosts`, `hostfile` | adding hosts to the host table and removing them (master) |
//! | `table`, `halt` | every daemon's part in the host table and in a shutdown |
//! | `asks` | requests between daemons |
//! | `spawn`, `rm`, `servers` | starting tasks, resource managers, hosters, taskers and tracers |
//! | `mailbox`, `groups`, `events` | state that the master keeps for the virtual machine |
//! | `guests`, `suspend` | pausing tasks for the owner of this host, or on request |
//! | `speaker` | owner agents, and what applies when one has died |
//! | `checkpoints` | checkpoints of jobs, and restarts from them |
//! | `engines` | migration without CRIU: the program exits and is started again |
//! | `moves`, `handover` | glue to the migration protocol, message order during migrations |

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        clippy::disallowed_types,
        reason = "the simulator reads its seed count and starts its clock"
    )
)]

mod asks;
mod checkpoints;
mod engines;
mod events;
mod groups;
mod guests;
mod halt;
mod handover;
mod hostfile;
mod hosts;
pub mod io;
#[allow(missing_docs)]
pub mod lanes;
mod late;
mod local;
mod mailbox;
mod moves;
mod news;
mod notify;
mod output;
mod pairs;
mod parting;
mod requests;
mod rm;
mod route;
mod servers;
mod spawn;
mod speaker;
mod survey;
mod suspend;
mod table;
mod tasks;
#[cfg(test)]
mod tests;
mod tickle;
mod trace;

pub use checkpoints::{COPIES_MAX, Copies};
pub use hostfile::own_plan;
pub use io::{ConnId, Event, HostPlan, Output, StartId, StartedHost, World};

use checkpoint_protocol::{SourceEvent, TargetEvent};
use sempa_proto::event::EventKind;
use sempa_proto::runtime_paths::RuntimePaths;
use sempa_proto::table::{HostEntry, HostTable};
use sempa_proto::tasker::{FromTasker, ToTasker};
use sempa_proto::{Epoch, HostId, Micros, MigrationId, Tid};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

/// Configuration of a daemon. It does not change while the daemon runs.
#[derive(Clone, Debug)]
pub struct MachineConfig {
    /// Index of this host; the master is [`HostId::MASTER`].
    pub host: HostId,
    pub name: String,
    pub vm: String,
    /// PVM architecture name of this host.
    pub arch: String,
    /// PVM data signature. Hosts with the same value share a data representation.
    pub dsig: i32,
    /// Addresses on which the daemon listens for other daemons.
    pub addresses: Vec<SocketAddr>,
    /// Relative speed; the default is 1000.
    pub speed: i32,
    /// User id under which the tasks of this host run.
    pub uid: u32,
    /// A host that is silent for this long is lost. Other waits for a peer that may be gone are
    /// multiples of it.
    pub lease: Micros,
    /// Command that starts the resource manager, split into words (master only).
    pub rm_command: Option<Vec<String>>,
    /// Commands that start a tasker, a tracer and a hoster, split into words.
    pub server_commands: Vec<Vec<String>>,
    /// Paths of the daemon's socket and files.
    pub place: RuntimePaths,
    pub hostfile: Vec<String>,
    /// Highest task number of each host that occurs in a checkpoint. New tasks get higher numbers
    /// (master only).
    pub spared: BTreeMap<HostId, u32>,
    /// Hosts to which checkpoints are copied (master only).
    pub copies: Copies,
}

/// An action that may be necessary at a later time. Timers are never cancelled, so each handler
/// first checks whether its action is still necessary.
#[derive(Clone, Copy, Debug)]
enum Timer {
    /// The start of a daemon has timed out.
    Start(StartId),
    /// A deleted host must have ended its tasks.
    Dismissed(HostId),
    /// The grace period of tasks that were asked to exit is over.
    Grace,
    /// This daemon must exit, even if tasks or hosts remain.
    Stop,
    /// A process exited, but its connection is still open. The number is the spawn token of the
    /// process.
    Drain(Tid, Option<i32>),
    /// A program that was asked to exit for this migration must have exited.
    Ending(Tid, MigrationId),
    /// The library of a task must have reported its link states, so that its program can be asked
    /// to exit for this migration.
    AskToEnd(Tid, MigrationId),
    /// A program was asked to exit for this migration, which was aborted. From now on its exit ends
    /// the task.
    EndsLate(Tid, MigrationId),
    /// The dump of a task for this part of a snapshot waits no longer for exit notices of other
    /// tasks.
    AwaitsEnds(Tid, MigrationId),
    /// The eviction of guests may be due.
    GuestsLeave,
    /// Guests that were asked to exit must be killed.
    GuestsEnd,
    /// The last directive of an owner agent that has died expires.
    Speaker(Tid),
    /// The load watcher of this host has died and may need to be started again.
    Watcher,
    /// Preempted tasks resume if there has been no resource manager for long.
    NoRm,
    /// Batched reports to the resource manager are due.
    News,
    /// A placement query has timed out.
    Survey(u64),
    /// The next checkpoint of a job, a retry of it, or a check whether the job's last tasks are
    /// gone is due.
    Job(Tid),
    /// The receiver of a checkpoint copy has not explained why the transfer failed.
    CopyUnsent(MigrationId),
    /// The last messages of an exited task have arrived at a task that watches it, or never will.
    LastWords { watcher: Tid, dead: Tid },
}

/// State that only the master has.
#[derive(Debug, Default)]
struct Master {
    hosts: hosts::Hosts,
    mailbox: mailbox::Mailbox,
    groups: groups::Groups,
    events: events::EventLog,
    directing: moves::Directing,
    keeping: checkpoints::Keeping,
}

/// State machine of one daemon.
#[derive(Debug)]
pub struct Machine {
    config: MachineConfig,
    now: Micros,
    /// Time of day at which the current event is handled.
    unix: Micros,
    out: VecDeque<Output>,
    timers: BTreeMap<(Micros, u64), Timer>,
    last_timer: u64,
    conns: local::Conns,
    tasks: tasks::Tasks,
    /// Message contexts that this daemon has allocated, with their owners.
    contexts: BTreeMap<i32, Tid>,
    last_context: u32,
    table: HostTable,
    prepared: Option<HostTable>,
    /// Epoch of the newest order; older orders are refused.
    epoch: Epoch,
    locations: route::Locations,
    pairs: pairs::Pairs,
    asks: asks::Asks,
    gathers: requests::Gathers,
    spawns: spawn::Spawns,
    execs: VecDeque<spawn::ExecJob>,
    beginnings: engines::Jobs,
    tasker_gone: bool,
    /// Whether the tasker pauses guests by the cgroup freezer; `None` until it has reported that.
    freezer: Option<Result<(), String>>,
    rm: rm::RmState,
    servers: servers::Servers,
    moves: moves::Moves,
    /// Transfer id and name of the checkpoint whose copy is being received from the master.
    coming_copy: Option<(MigrationId, String)>,
    news: news::News,
    late: late::Late,
    hosting: guests::Hosting,
    suspending: suspend::Suspending,
    surveys: survey::Surveys,
    stop: Option<halt::Stop>,
    /// Debug mask that a task has set with `pvm_tickle`. It is only displayed and has no effect.
    debug_mask: i32,
    traces: trace::Traces,
    master: Option<Box<Master>>,
}

impl Machine {
    /// Creates the machine of a daemon that has just started. The master's host table contains the
    /// master itself; a slave's is empty until the slave has joined.
    pub fn new(config: MachineConfig, now: Micros) -> Machine {
        let mut machine = Machine {
            now,
            unix: Micros::default(),
            out: VecDeque::new(),
            timers: BTreeMap::new(),
            last_timer: 0,
            conns: local::Conns::default(),
            tasks: tasks::Tasks::default(),
            contexts: BTreeMap::new(),
            last_context: 0,
            table: HostTable::default(),
            prepared: None,
            epoch: Epoch::default(),
            locations: route::Locations::default(),
            pairs: pairs::Pairs::default(),
            asks: asks::Asks::default(),
            gathers: requests::Gathers::default(),
            spawns: spawn::Spawns::default(),
            execs: VecDeque::new(),
            beginnings: engines::Jobs::new(),
            tasker_gone: false,
            freezer: None,
            rm: rm::RmState::default(),
            servers: servers::Servers::default(),
            moves: moves::Moves::default(),
            coming_copy: None,
            news: news::News::default(),
            late: late::Late::default(),
            hosting: guests::Hosting::default(),
            suspending: suspend::Suspending::default(),
            surveys: survey::Surveys::default(),
            stop: None,
            debug_mask: 0,
            traces: trace::Traces::default(),
            master: None,
            config,
        };
        if machine.config.host == HostId::MASTER {
            machine.found();
        }
        machine
    }

    /// Creates the virtual machine on the master: a host table with the master itself, and the list
    /// of hosts to start from the host file.
    fn found(&mut self) {
        let lines = std::mem::take(&mut self.config.hostfile);
        let (file, start, ignored) = hostfile::HostFile::read(&lines, &self.config.name);
        let speed = file
            .options(&self.config.name)
            .speed
            .unwrap_or(self.config.speed);
        let begin = (!lines.is_empty()).then_some(hosts::HostFileBegin { start, ignored });
        self.master = Some(Box::new(Master {
            hosts: hosts::Hosts::new(file, begin),
            ..Master::default()
        }));
        let own = self.spared_on(self.config.host);
        self.tasks.spare(own);
        let config = &self.config;
        let entry = HostEntry {
            id: config.host,
            name: config.name.clone(),
            arch: config.arch.clone(),
            speed,
            dsig: config.dsig,
            addresses: config.addresses.clone(),
        };
        self.table = HostTable {
            epoch: self.next_epoch(),
            hosts: vec![entry],
        };
    }

    /// Handles an event. `now` is monotonic.
    pub fn handle(&mut self, now: Micros, world: &mut dyn World, event: Event) {
        self.now = now;
        self.unix = world.unix_time();
        self.catch_up();
        if let Some(master) = &mut self.master {
            master.keeping.found(self.unix);
        }
        self.begin_host_file();
        self.dispatch(event);
        self.run_timers();
        loop {
            if self.pump_moves() || self.begin_again(world) {
                continue;
            }
            let Some(job) = self.execs.pop_front() else {
                break;
            };
            self.exec(world, job);
        }
    }

    fn dispatch(&mut self, event: Event) {
        match event {
            Event::TaskConnected { conn, pid } => self.task_connected(conn, pid),
            Event::TaskControl { conn, message } => self.task_control(conn, message),
            Event::TaskRoute {
                conn,
                to,
                word,
                descriptors,
            } => self.task_route(conn, to, word, descriptors),
            Event::TaskLink { conn, frame } => self.link_from_task(conn, frame),
            Event::TaskClosed { conn, garbage } => self.task_closed(conn, garbage),
            Event::HostConnected { host } => self.host_connected(host),
            Event::HostControl { host, message } => self.host_control(host, message),
            Event::HostCarried { host, carried } => self.host_carried(host, carried),
            Event::HostLost { host, why } => self.host_lost(host, &why),
            Event::HostStarted { start, result } => self.host_started(start, result),
            Event::HostsPrepared { orders } => self.hosts_prepared(orders),
            Event::Tasker(message) => self.tasker_says(message),
            Event::TaskerGone { why } => self.tasker_ended(&why),
            Event::ImagesSent { migration, result } if self.moves.deposits.contains(&migration) => {
                self.deposited(migration, result.map(|_| ()));
            }
            Event::ImagesSent { migration, result } if self.is_unpacked_here(migration) => {
                self.part_sent(migration, result.map(|_| ()));
            }
            Event::ImagesReceived { migration, result } if self.is_part_of_cut(migration) => {
                self.part_received(migration, result.map(|_| ()));
            }
            Event::ImagesSent { migration, result } if self.is_copy(migration) => {
                self.copy_sent(migration, result.map(|_| ()).map_err(|why| why.to_string()));
            }
            Event::ImagesReceived { migration, result } if self.is_coming_copy(migration) => {
                self.copy_received(migration, result.map(|_| ()).map_err(|why| why.to_string()));
            }
            Event::SetBegun { cut, result } => self.set_begun(cut, result),
            Event::PartKept { migration, result } => self.part_kept(migration, result),
            Event::SetSealed { cut, result } => self.set_sealed(cut, result),
            Event::SetOpened { restart, result } => self.set_opened(restart, result),
            Event::PartRead { migration, result } => self.part_read(migration, result),
            Event::StateCollected { migration, result } => self.state_collected(migration, result),
            Event::StateStaged { migration, result } => self.state_staged(migration, result),
            Event::StateNamed { migration, result } => self.state_named(migration, result),
            Event::SetsListed { tid, id, result } => self.sets_listed(tid, id, result),
            Event::SetsRemoved { tid, id, result } => self.sets_removed(tid, id, result),
            Event::SetsSwept { sets } => self.sets_swept(sets),
            Event::ImagesSent { migration, result } => {
                self.source_event(migration, SourceEvent::ImagesSent(result.map(|_| ())));
            }
            Event::ImagesReceived { migration, result } => {
                self.target_event(migration, TargetEvent::Received(result));
            }
            Event::MemoryLost { migration, why } => {
                self.tell_tasker(ToTasker::MemoryLost { migration, why })
            }
            Event::MoveRecorded { migration, result } => self.move_recorded(migration, result),
            Event::Stranger { text } => {
                self.log(text.clone());
                self.record(EventKind::Note { text });
            }
            Event::Wake => {}
            Event::Stop { why } => self.stop_asked(&why),
        }
    }

    fn tasker_says(&mut self, message: FromTasker) {
        match message {
            FromTasker::Ready(capabilities) => {
                // The tasker repeats this message when it has learned more about its engine.
                let is_new =
                    std::mem::replace(&mut self.tasker_gone, false) || self.freezer.is_none();
                match &capabilities.engine {
                    Ok(version) => self.log(format!("tasks can be moved: engine {version}")),
                    Err(why) => self.log(format!("tasks cannot be moved: {why}")),
                }
                match &capabilities.freezer {
                    Ok(()) => {
                        self.log("guests are stopped by the freezer of control groups".into())
                    }
                    Err(why) => self.log(format!(
                        "guests are stopped by signals, not by a freezer: {why}"
                    )),
                }
                self.freezer = Some(capabilities.freezer);
                // A slave does so when it has joined the virtual machine.
                if is_new && !self.table.hosts.is_empty() {
                    self.start_commands();
                }
            }
            FromTasker::Started { tid, pid } => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.pid = pid;
                }
            }
            FromTasker::ExitExpected { tid } => self.ask_by_message(tid),
            FromTasker::ExitNotRequested { tid, why } => self.not_asked(tid, why),
            FromTasker::StartFailed { tid, why } => self.start_failed(tid, &why),
            FromTasker::Output { tid, bytes } => self.task_output(tid, bytes),
            FromTasker::Paused { tid } => self.guest_held(tid),
            FromTasker::QueryInspected {
                query: question,
                result,
            } => self.task_seen(question, result),
            FromTasker::QueryJudged {
                query: question,
                verdict,
            } => self.task_judged(question, verdict),
            FromTasker::Exited { tid, status, used } => self.process_exited(tid, status, used),
            message => self.tasker_on_move(message),
        }
    }

    /// Ends all tasks that the tasker had started, because they died with it. No task can be
    /// started here until there is a new tasker.
    fn tasker_ended(&mut self, why: &str) {
        self.tasker_gone = true;
        if self.stop.is_none() {
            self.log(format!(
                "the tasker has ended ({why}); its tasks on this host are dead"
            ));
            self.record(EventKind::TaskerGone {
                host: self.config.host,
                why: why.to_string(),
            });
        }
        let dead = self
            .tasks
            .live
            .values()
            .filter(|t| t.spawned())
            .map(|t| (t.tid, t.used_before));
        for (tid, used) in dead.collect::<Vec<_>>() {
            self.end_task(tid, 9, used);
        }
        self.moves_tasker_gone(why);
        self.surveys_tasker_gone();
        self.stop_step();
    }

    fn timer(&mut self, after: Micros, timer: Timer) {
        self.last_timer += 1;
        self.timers
            .insert((self.now + after, self.last_timer), timer);
    }

    fn run_timers(&mut self) {
        while let Some(entry) = self.timers.first_entry()
            && entry.key().0 <= self.now
        {
            match entry.remove() {
                Timer::Start(start) => self.start_deadline(start),
                Timer::Dismissed(host) => self.dismissed_deadline(host),
                Timer::Grace => self.grace_over(),
                Timer::Stop => self.stop_deadline(),
                Timer::AskToEnd(tid, migration) => self.not_heard(tid, migration),
                Timer::EndsLate(tid, migration) => self.ends_no_more(tid, migration),
                Timer::Ending(tid, migration) => self.ending_over(tid, migration),
                Timer::AwaitsEnds(tid, migration) => self.await_no_longer(tid, migration),
                Timer::GuestsLeave => self.guests_leave(),
                Timer::GuestsEnd => self.guests_end(),
                Timer::Speaker(tid) => self.speaker_time_over(tid),
                Timer::Watcher => self.watcher_due(),
                Timer::NoRm => self.go_on_without_rm(),
                Timer::News => self.news_due(),
                Timer::Survey(survey) => self.survey_deadline(survey),
                Timer::Job(job) => self.job_due(job),
                Timer::CopyUnsent(migration) => self.copy_unsent(migration),
                Timer::Drain(tid, epid) => self.drain_over(tid, epid),
                Timer::LastWords { watcher, dead } => self.last_words_over(watcher, dead),
            }
        }
        let now = self.now;
        let Some(master) = &mut self.master else {
            return;
        };
        if master
            .directing
            .coordinator
            .next_deadline()
            .is_some_and(|at| at <= now)
        {
            master.directing.coordinator.on_timer(now);
        }
        master.keeping.cuts.on_timer(now);
        master.keeping.restarts.on_timer(now);
    }

    /// Returns the next effect to carry out, or `None`.
    pub fn poll(&mut self) -> Option<Output> {
        self.out.pop_front()
    }

    /// Returns the time at which [`Event::Wake`] is needed, if at all.
    pub fn next_wakeup(&self) -> Option<Micros> {
        let moves = self
            .master
            .as_ref()
            .and_then(|m| m.directing.coordinator.next_deadline());
        let timer = self.timers.keys().next().map(|(at, _)| *at);
        let keeping = self.master.as_ref().and_then(|m| m.keeping.next_wakeup());
        timer
            .into_iter()
            .chain(moves)
            .chain(keeping)
            .chain(self.late.due())
            .min()
    }

    /// Returns the host table in force. It is empty on a slave that has not joined yet.
    pub fn table(&self) -> &HostTable {
        &self.table
    }
}
