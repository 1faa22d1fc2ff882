//! The connections of the load watchers of virtual machines.

use crate::owner_view::OwnerView;
use crate::sensors::{LoadMeter, Sensors};
use procfs::process::Process;
use pvm_load_watcher::host_daemons::{INIT_PROGRAM, TASKER_PROGRAM};
use pvm_load_watcher::host_policy::{HostPolicy, user_name};
use pvm_load_watcher::load_attribution::child_processes;
use pvm_load_watcher::machine_link::{
    FromMachine, HostState, MessageReader, REQUEST_BYTES_MAX, ToMachine, VmFacts, send,
};
use pvm_load_watcher::shared_limit::SharedLimit;
use sempa_proto::Micros;
use sempa_service_settings::host_account::{HostTotals, SessionUse};
use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Maximum number of connections, and of those of one user.
const CONNECTIONS_MAX: usize = 1024;
const CONNECTIONS_OF_USER_MAX: usize = 32;
/// Maximum number of messages of a connection in [`RATE_WINDOW`]. A load watcher sends one in a
/// second, and one for each change.
const MESSAGES_IN_WINDOW_MAX: usize = 50;
const RATE_WINDOW: Micros = Micros::from_secs(5);
/// Maximum number of ancestors among which the tasker of a load watcher is looked for.
const ANCESTORS_MAX: usize = 8;

/// One virtual machine, as the load watcher of the machine sees it.
pub(crate) struct VmView {
    pub(crate) facts: VmFacts,
    pub(crate) owner: OwnerView,
    /// Process id of the tasker; `None` if it is unknown.
    tasker: Option<i32>,
    meter: LoadMeter,
    /// Processors that the tasks of this virtual machine used in the last sample.
    task_cpus: Option<f32>,
    /// Number of guests that this virtual machine may have in addition to those of the others;
    /// `None` if there is no limit.
    guests_max: Option<u32>,
    last_sent: Option<HostState>,
}

impl VmView {
    /// Returns the state of the machine for this virtual machine.
    pub(crate) fn state(&self, sensors: &Sensors) -> HostState {
        let mut state = self.owner.state(sensors);
        state.sample.task_cpus = self.task_cpus;
        let limits = &mut state.decision.limits;
        if let (Some(stated), Some(remaining)) = (limits.guests_max, self.guests_max) {
            limits.guests_max = Some(stated.min(remaining));
            limits.other_guests = stated.saturating_sub(remaining);
        }
        state
    }

    /// Returns the owner's limit of guests. `of_machine` applies to all users together.
    pub(crate) fn shared_limit(&self, of_machine: Option<u32>) -> SharedLimit {
        SharedLimit {
            of_machine,
            of_vm: self.owner.policy().cores,
        }
    }

    /// Counts the guests of the other virtual machines against the owner's limit.
    pub(crate) fn count_other_guests(&mut self, of_machine: Option<u32>, totals: &HostTotals) {
        let is_other = |session: &&SessionUse| Some(session.session.0) != self.tasker;
        let others = totals.sessions.iter().filter(is_other);
        let others = others.map(|session| session.usage.guests).sum();
        self.guests_max = self.shared_limit(of_machine).remaining(others);
    }

    /// True if the virtual machine must be told of a state at once. A new sample alone is sent with
    /// the next sample of all.
    pub(crate) fn is_new(&self, state: &HostState) -> bool {
        self.last_sent.as_ref().is_none_or(|sent| {
            (&sent.assessment, &sent.decision, &sent.policy)
                != (&state.assessment, &state.decision, &state.policy)
        })
    }

    pub(crate) fn record_sent(&mut self, state: &HostState) {
        self.last_sent = Some(state.clone());
    }

    /// Measures how many processors the tasks have used since the last sample.
    pub(crate) fn measure_tasks(&mut self, sensors: &Sensors, must_restart: bool) {
        if must_restart {
            self.meter.restart();
        }
        let uid = self.owner.uid();
        let processes = || main_processes(self.tasker, self.facts.daemon_pid, uid);
        self.task_cpus =
            self.meter
                .measure_tasks(&sensors.last_sample, sensors.cpu_times(), processes);
    }

    /// Returns the main processes of the tasks, with those of the daemon and the tasker.
    pub(crate) fn main_processes(&self) -> Vec<i32> {
        main_processes(self.tasker, self.facts.daemon_pid, self.owner.uid())
    }
}

/// Returns the main processes of the tasks of a tasker, the tasker, and the daemon with its
/// children. The user has named the daemon, so it counts only if it belongs to the user.
fn main_processes(tasker: Option<i32>, daemon: Option<i32>, uid: u32) -> Vec<i32> {
    let of_user = |pid: &i32| {
        Process::new(*pid)
            .and_then(|process| process.uid())
            .is_ok_and(|owner| owner == uid)
    };
    let daemon = daemon.filter(of_user);
    let daemon_processes = daemon
        .into_iter()
        .chain(daemon.into_iter().flat_map(children));
    let tasks = tasker.into_iter().flat_map(children).flat_map(|pid| {
        match program(pid).as_deref() {
            // The first process of the task's namespace; the task is its child.
            Some(INIT_PROGRAM) => children(pid),
            _ => vec![pid],
        }
    });
    let mut pids: Vec<i32> = tasker
        .into_iter()
        .chain(tasks)
        .chain(daemon_processes)
        .collect();
    pids.sort_unstable();
    pids.dedup();
    pids
}

fn children(pid: i32) -> Vec<i32> {
    child_processes(Path::new("/proc"), pid)
}

fn program(pid: i32) -> Option<String> {
    let stat = Process::new(pid).and_then(|process| process.stat());
    stat.ok().map(|stat| stat.comm)
}

/// Returns the tasker that has started a load watcher.
fn tasker_of(watcher: i32) -> Option<i32> {
    let parent = |pid: &i32| {
        let stat = Process::new(*pid).and_then(|process| process.stat());
        stat.ok().map(|stat| stat.ppid).filter(|pid| *pid > 1)
    };
    std::iter::successors(parent(&watcher), parent)
        .take(ANCESTORS_MAX)
        .find(|pid| program(*pid).as_deref() == Some(TASKER_PROGRAM))
}

/// A connection of the load watcher of a virtual machine.
pub(crate) struct Connection {
    stream: UnixStream,
    reader: MessageReader<ToMachine>,
    pub(crate) uid: u32,
    /// Process id of the load watcher.
    pid: i32,
    /// `None` before the first message.
    pub(crate) view: Option<Box<VmView>>,
    window_start: Micros,
    messages_in_window: usize,
}

impl Connection {
    pub(crate) fn new(stream: UnixStream, uid: u32, pid: i32) -> Self {
        Self {
            stream,
            reader: MessageReader::new(REQUEST_BYTES_MAX),
            uid,
            pid,
            view: None,
            window_start: Micros::default(),
            messages_in_window: 0,
        }
    }

    /// Reads the messages that have arrived.
    ///
    /// # Errors
    /// The connection has ended, a message is malformed, or there are too many messages.
    pub(crate) fn receive(&mut self, now: Micros) -> io::Result<Vec<ToMachine>> {
        let messages = self.reader.read(&self.stream)?;
        if now.since(self.window_start) >= RATE_WINDOW {
            (self.window_start, self.messages_in_window) = (now, 0);
        }
        self.messages_in_window += messages.len();
        match self.messages_in_window <= MESSAGES_IN_WINDOW_MAX {
            true => Ok(messages),
            false => Err(io::Error::other("too many messages")),
        }
    }

    /// Stores what the virtual machine's load watcher says. `read_policy` is called for its first
    /// message, and if the settings have changed that are read only then.
    pub(crate) fn set_facts(
        &mut self,
        facts: VmFacts,
        read_policy: impl FnOnce(&Self, &VmFacts) -> HostPolicy,
    ) {
        let same_defaults = |view: &VmView| view.facts.guest_defaults == facts.guest_defaults;
        if let Some(view) = self.view.as_mut().filter(|view| same_defaults(view)) {
            if view.facts.user_policy != facts.user_policy {
                let file = facts.user_policy.clone();
                view.owner
                    .change_policy(|host_policy| host_policy.set_user_policy(file));
            }
            view.facts = facts;
            return;
        }
        let host_policy = read_policy(self, &facts);
        self.view = Some(Box::new(VmView {
            owner: OwnerView::new(self.uid, user_name(self.uid), host_policy),
            facts,
            tasker: tasker_of(self.pid),
            meter: LoadMeter::new(),
            task_cpus: None,
            guests_max: None,
            last_sent: None,
        }));
    }
}

/// All connections, by a number that is never used again.
#[derive(Default)]
pub(crate) struct Connections {
    connections: BTreeMap<u64, Connection>,
    last_id: u64,
}

impl Connections {
    /// True if no virtual machine is served.
    pub(crate) fn is_empty(&self) -> bool {
        self.connections
            .values()
            .all(|connection| connection.view.is_none())
    }

    /// Adds a connection. Closes it instead if its user, or all users together, have too many.
    pub(crate) fn add(&mut self, connection: Connection) {
        let of_user = self
            .connections
            .values()
            .filter(|other| other.uid == connection.uid);
        if self.connections.len() < CONNECTIONS_MAX && of_user.count() < CONNECTIONS_OF_USER_MAX {
            self.last_id += 1;
            self.connections.insert(self.last_id, connection);
        }
    }

    pub(crate) fn remove(&mut self, id: u64) {
        self.connections.remove(&id);
    }

    pub(crate) fn ids(&self) -> Vec<u64> {
        self.connections.keys().copied().collect()
    }

    pub(crate) fn get_mut(&mut self, id: u64) -> Option<&mut Connection> {
        self.connections.get_mut(&id)
    }

    pub(crate) fn view_mut(&mut self, id: u64) -> Option<&mut VmView> {
        self.connections.get_mut(&id)?.view.as_deref_mut()
    }

    pub(crate) fn views_mut(&mut self) -> impl Iterator<Item = &mut VmView> {
        let connections = self.connections.values_mut();
        connections.filter_map(|connection| connection.view.as_deref_mut())
    }

    /// Sends a message. Closes a connection that does not read, or has ended.
    pub(crate) fn send(&mut self, id: u64, message: &FromMachine) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        if send(&connection.stream, message).is_err() {
            self.remove(id);
        }
    }
}
