//! The daemon as a value: tasks, hosts, routing, notification, mailbox, moves. No socket, file, clock or chance inside.
//!
//! The shell feeds [`Machine::handle`] with [`Event`]s, then takes [`Output`]s from [`Machine::poll`] until there are none,
//! and calls again with [`Event::Wake`] at [`Machine::next_wakeup`].

pub mod io;

pub use io::{ConnId, Event, HostPlan, Output, StartId, StartedHost, World};

use sempa_proto::place::Place;
use sempa_proto::{HostId, Micros};
use std::collections::VecDeque;
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
    /// Command of the resource manager to start (master only), split into words.
    pub rm_command: Option<Vec<String>>,
    /// Where its socket and files are.
    pub place: Place,
    /// Lines of the host file (master only).
    pub hostfile: Vec<String>,
}

/// The daemon's state.
#[derive(Debug)]
pub struct Machine {
    config: MachineConfig,
    out: VecDeque<Output>,
}

impl Machine {
    /// A daemon that has just started.
    pub fn new(config: MachineConfig, _now: Micros) -> Machine {
        Machine { config, out: VecDeque::new() }
    }

    /// Takes an event. `now` is monotonic.
    pub fn handle(&mut self, _now: Micros, _world: &mut dyn World, event: Event) {
        self.out.push_back(Output::Log { text: format!("{}: {event:?}", self.config.name) });
    }

    /// The next thing to do, or `None`.
    pub fn poll(&mut self) -> Option<Output> {
        self.out.pop_front()
    }

    /// When [`Event::Wake`] is wanted, if at all.
    pub fn next_wakeup(&self) -> Option<Micros> {
        None
    }
}
