//! The daemon as a value: tasks, hosts, routing, notification, mailbox, moves. No socket, file, clock or chance inside.
//!
//! The shell feeds [`Machine::handle`] with [`Event`]s, then takes [`Output`]s from [`Machine::poll`] until there are none,
//! and calls again with [`Event::Wake`] at [`Machine::next_wakeup`].
//!
//! * `local`, `tasks`, `requests`: connections of tasks, the task table, what tasks may ask.
//! * `route`, `notify`, `output`: the ways of link frames, items, notifications and standard output.
//! * `pairs`: routes that two tasks here have of their own.
//! * `hosts`, `hostfile`: the master's work on the host table; `table`, `halt`: every daemon's.
//! * `asks`: questions between daemons.
//! * `spawn`, `rm`, `servers`: starting tasks, resource managers, tasks that do a daemon's work.
//! * `mailbox`, `groups`, `events`: what the master keeps for all.
//! * `guests`, `suspend`: tasks that stand still because the owner of this host is there, or because they are suspended;
//!   `speaker`: what counts when who speaks for the owner has died.
//! * `checkpoints`: jobs that are written to the store and started again.
//! * `engines`: tasks that are taken elsewhere by starting their program again.
//! * `moves`, `handover`: the glue to the migration protocol, and what is kept in order while a task changes hosts.

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
use sempa_proto::place::Place;
use sempa_proto::table::{HostEntry, HostTable};
use sempa_proto::tasker::{FromTasker, ToTasker};
use sempa_proto::{Epoch, HostId, Micros, MigrationId, Tid};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

/// What a daemon knows of itself when it starts.
#[derive(Clone, Debug)]
pub struct MachineConfig {
    /// Its index; the master is [`HostId::MASTER`].
    pub host: HostId,
    /// Its name in the host table.
    pub name: String,
    /// Name of the virtual machine.
    pub vm: String,
    /// Architecture name.
    pub arch: String,
    /// Data signature.
    pub dsig: i32,
    /// Where it listens.
    pub addresses: Vec<SocketAddr>,
    /// Relative speed.
    pub speed: i32,
    /// User id that its tasks run as.
    pub uid: u32,
    /// A host that is silent for so long is lost; what else has to wait for somebody who is gone is reckoned in it.
    pub lease: Micros,
    /// Command of the resource manager to start (master only), split into words.
    pub rm_command: Option<Vec<String>>,
    /// Commands of a tasker, a tracer and a hoster to start, split into words.
    pub server_commands: Vec<Vec<String>>,
    /// Where its socket and files are.
    pub place: Place,
    /// Lines of the host file (master only).
    pub hostfile: Vec<String>,
    /// Tasks in checkpoints have numbers up to these on their hosts (master only).
    pub spared: BTreeMap<HostId, u32>,
    /// Where checkpoints are copied to (master only).
    pub copies: Copies,
}

/// Something to look at when its time has come. It may not matter any more by then.
#[derive(Clone, Copy, Debug)]
enum Timer {
    /// A daemon that is being started.
    Start(StartId),
    /// A deleted host that has to end.
    Dismissed(HostId),
    /// Tasks that were asked to end.
    Grace,
    /// This daemon, which is ending.
    Stop,
    /// The socket of a process that has ended.
    Drain(Tid, Option<i32>),
    /// A task that was asked to end, for this move, to begin again.
    Ending(Tid, MigrationId),
    /// The same, whose library has not said that it takes nothing in any more.
    AskToEnd(Tid, MigrationId),
    /// The same, which has not ended in its time and may yet.
    EndsLate(Tid, MigrationId),
    /// A task that is to be written, for this part of a checkpoint, and waits for the ends of others.
    AwaitsEnds(Tid, MigrationId),
    /// Guests may have to leave.
    GuestsLeave,
    /// Guests that were asked to end.
    GuestsEnd,
    /// The last word of who spoke for the owner and has ended.
    Speaker(Tid),
    /// The load watcher of this host, which has died.
    Watcher,
    /// There may have been no resource manager for long.
    NoRm,
    /// News that a resource manager is not told at once.
    News,
    /// A survey that has to end.
    Survey(u64),
    /// A job that is to be checkpointed, or whose last tasks are to be gone.
    Job(Tid),
    /// A copy of a checkpoint that could not leave.
    CopyUnsent(MigrationId),
    /// The last messages of a dead task.
    LastWords { watcher: Tid, dead: Tid },
}

/// What only the master has.
#[derive(Debug, Default)]
struct Master {
    hosts: hosts::Hosts,
    mailbox: mailbox::Mailbox,
    groups: groups::Groups,
    events: events::EventLog,
    directing: moves::Directing,
    keeping: checkpoints::Keeping,
}

/// The daemon's state.
#[derive(Debug)]
pub struct Machine {
    config: MachineConfig,
    now: Micros,
    /// Time of day of the event that is being handled.
    unix: Micros,
    out: VecDeque<Output>,
    timers: BTreeMap<(Micros, u64), Timer>,
    last_timer: u64,
    conns: local::Conns,
    tasks: tasks::Tasks,
    /// Contexts given out here, with their owners.
    contexts: BTreeMap<i32, Tid>,
    last_context: u32,
    table: HostTable,
    prepared: Option<HostTable>,
    /// Of the newest order; older ones are refused.
    epoch: Epoch,
    locations: route::Locations,
    pairs: pairs::Pairs,
    asks: asks::Asks,
    gathers: requests::Gathers,
    spawns: spawn::Spawns,
    execs: VecDeque<spawn::ExecJob>,
    beginnings: engines::Jobs,
    tasker_gone: bool,
    /// How the tasker stops guests, when it has said so.
    freezer: Option<Result<(), String>>,
    rm: rm::RmState,
    servers: servers::Servers,
    moves: moves::Moves,
    /// The copy that is on its way from the master into the store of this host, and of which set.
    coming_copy: Option<(MigrationId, String)>,
    news: news::News,
    late: late::Late,
    hosting: guests::Hosting,
    suspending: suspend::Suspending,
    surveys: survey::Surveys,
    stop: Option<halt::Stop>,
    /// What somebody set with `pvm_tickle`; shown, and without effect.
    debug_mask: i32,
    traces: trace::Traces,
    master: Option<Box<Master>>,
}

impl Machine {
    /// A daemon that has just started. The master's table holds itself; a slave's is empty until the master takes it in.
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

    /// The master founds the virtual machine: a table with itself, and the hosts of its host file to come.
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

    /// Takes an event. `now` is monotonic.
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
                self.source_event(migration, SourceEvent::Sent(result.map(|_| ())));
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
                // It says so again when it finds out more about its engine.
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
                // A slave takes tasks when it has been taken in itself.
                if is_new && !self.table.hosts.is_empty() {
                    self.start_commands();
                }
            }
            FromTasker::Started { tid, pid } => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.pid = pid;
                }
            }
            FromTasker::ExpectsEnd { tid } => self.ask_by_message(tid),
            FromTasker::NotAsked { tid, why } => self.not_asked(tid, why),
            FromTasker::StartFailed { tid, why } => self.start_failed(tid, &why),
            FromTasker::Output { tid, bytes } => self.task_output(tid, bytes),
            FromTasker::Held { tid } => self.guest_held(tid),
            FromTasker::Seen { question, result } => self.task_seen(question, result),
            FromTasker::Judged { question, verdict } => self.task_judged(question, verdict),
            FromTasker::Exited { tid, status, used } => self.process_exited(tid, status, used),
            message => self.tasker_on_move(message),
        }
    }

    /// What the tasker had started is dead. Nothing can be started here until there is another one.
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
            .next_wakeup()
            .is_some_and(|at| at <= now)
        {
            master.directing.coordinator.wake(now);
        }
        master.keeping.cuts.wake(now);
        master.keeping.restarts.wake(now);
    }

    /// The next thing to do, or `None`.
    pub fn poll(&mut self) -> Option<Output> {
        self.out.pop_front()
    }

    /// When [`Event::Wake`] is wanted, if at all.
    pub fn next_wakeup(&self) -> Option<Micros> {
        let moves = self
            .master
            .as_ref()
            .and_then(|m| m.directing.coordinator.next_wakeup());
        let timer = self.timers.keys().next().map(|(at, _)| *at);
        let keeping = self.master.as_ref().and_then(|m| m.keeping.next_wakeup());
        timer
            .into_iter()
            .chain(moves)
            .chain(keeping)
            .chain(self.late.due())
            .min()
    }

    /// The host table in force; empty before a slave has been taken in.
    pub fn table(&self) -> &HostTable {
        &self.table
    }
}
