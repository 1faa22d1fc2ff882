//! Orderly shutdown: of the virtual machine, of a deleted host, or of a daemon that receives a
//! signal.
//!
//! 1. Tasks are asked to exit. Those that remain after [`EXIT_GRACE_TIMEOUT`] are killed.
//! 2. A slave that has no tasks left reports that to the master and waits for the order to exit.
//! 3. The master waits for all slaves, but not longer than [`STOP_TIMEOUT`].
//!
//! Programs that were started from a command line are asked once, as PVM does it. The daemon did
//! not start them, so it does not wait for them or kill them.

use super::tasks::Task;
use super::{Machine, Output, Timer};
use sempa_proto::host::HostMsg;
use sempa_proto::task::OnDaemonExit;
use sempa_proto::tasker::ToTasker;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeSet;

/// Time for tasks to exit before they are killed.
const EXIT_GRACE_TIMEOUT: Micros = Micros::from_millis(500);
/// Time after which a daemon exits in any case. Its tasker then kills the remaining processes.
const STOP_TIMEOUT: Micros = Micros::from_secs(5);
const SIGTERM: i32 = 15;

/// Progress of the shutdown of this daemon.
#[derive(Debug)]
pub(super) struct ShutdownState {
    why: String,
    /// Master: hosts that have not reported that they have no tasks left.
    awaited_hosts: BTreeSet<HostId>,
    /// Slave: true if this daemon has reported that it has no tasks left.
    no_tasks_reported: bool,
    is_done: bool,
}

impl Machine {
    /// Handles a stop request from outside, for example a signal. On the master it ends the virtual
    /// machine.
    pub(super) fn handle_stop_request(&mut self, why: &str) {
        if self.master.is_some() {
            self.halt(why)
        } else {
            self.shut_down_orderly(why)
        }
    }

    /// Master: ends the virtual machine.
    pub(super) fn halt(&mut self, why: &str) {
        if self.shutdown.is_some() {
            return;
        }
        self.log(format!("the virtual machine is being halted: {why}"));
        let mut waiting: BTreeSet<HostId> = self.other_hosts().into_iter().collect();
        if let Some(master) = &self.master {
            waiting.extend(master.host_changes.hosts_outside_table());
        }
        for host in &waiting {
            self.send_to_host(
                *host,
                HostMsg::Halt {
                    why: why.to_string(),
                },
            );
        }
        self.abandon_starts();
        self.begin_stop(why, waiting);
    }

    /// Shuts this daemon down in an orderly way.
    pub(super) fn shut_down_orderly(&mut self, why: &str) {
        if self.shutdown.is_none() {
            self.log(format!("this daemon ends: {why}"));
            self.begin_stop(why, BTreeSet::new());
        }
    }

    fn begin_stop(&mut self, why: &str, awaited_hosts: BTreeSet<HostId>) {
        self.shutdown = Some(ShutdownState {
            why: why.to_string(),
            awaited_hosts,
            no_tasks_reported: false,
            is_done: false,
        });
        self.set_timer(EXIT_GRACE_TIMEOUT, Timer::ExitGrace);
        self.set_timer(STOP_TIMEOUT, Timer::DaemonStop);
        for tid in self.spawned_processes() {
            self.send_to_tasker(ToTasker::Signal {
                tid,
                signal: SIGTERM,
            });
        }
        self.signal_unspawned_tasks();
        self.advance_stop();
    }

    /// Sends SIGTERM to the tasks that this daemon's tasker has not started, except those that want
    /// their calls to fail instead.
    fn signal_unspawned_tasks(&mut self) {
        let wants = |t: &&Task| {
            !t.is_spawned() && (t.tasker.is_some() || t.on_daemon_exit == OnDaemonExit::Terminate)
        };
        let conns: Vec<_> = self
            .tasks
            .live
            .values()
            .filter(wants)
            .filter_map(Task::conn)
            .collect();
        for conn in conns {
            self.outputs.push_back(Output::Signal {
                conn,
                signal: SIGTERM,
            });
        }
    }

    /// Returns the tasks whose processes this daemon's tasker has started.
    fn spawned_processes(&self) -> Vec<Tid> {
        self.tasks
            .live
            .values()
            .filter(|t| t.is_spawned() && t.exit_report.is_none() && !t.is_respawning())
            .map(|t| t.tid)
            .collect()
    }

    /// Kills the remaining tasks at the end of the grace period.
    pub(super) fn kill_remaining_tasks(&mut self) {
        if self.shutdown.as_ref().is_some_and(|s| !s.is_done) {
            for tid in self.spawned_processes() {
                self.send_to_tasker(ToTasker::Kill { tid });
            }
        }
    }

    /// Takes the next step of the shutdown when no task and no host is awaited any more.
    pub(super) fn advance_stop(&mut self) {
        let tasks_left = !self.tasker_gone && !self.spawned_processes().is_empty();
        let Some(stop) = &mut self.shutdown else {
            return;
        };
        if tasks_left || stop.is_done {
            return;
        }
        if self.master.is_none() {
            if !std::mem::replace(&mut stop.no_tasks_reported, true) {
                let why = stop.why.clone();
                self.send_to_host(HostId::MASTER, HostMsg::Leaving { why });
            }
        } else if stop.awaited_hosts.is_empty() {
            self.shut_down_now("all hosts have ended their tasks");
        }
    }

    /// Handles the report of a host that it has no tasks left and shuts down.
    pub(super) fn handle_host_leaving(&mut self, host: HostId, why: &str) {
        if self.master.is_none() {
            return;
        }
        if let Some(stop) = &mut self.shutdown {
            stop.awaited_hosts.remove(&host);
            return self.advance_stop();
        }
        self.send_to_host(host, HostMsg::Shutdown);
        self.notify_coordinators_of_lost_host(host);
        if !self.is_leaving(host) {
            self.roll_back_for_lost_host(host);
            self.remove_lost_host(host, why);
        }
    }

    /// Master: stops waiting for a host that was lost.
    pub(super) fn stop_awaiting_host(&mut self, host: HostId) {
        if let Some(stop) = &mut self.shutdown {
            stop.awaited_hosts.remove(&host);
            self.advance_stop();
        }
    }

    /// Exits although hosts or processes remain. The tasker kills the processes.
    pub(super) fn handle_stop_timeout(&mut self) {
        if let Some(stop) = self.shutdown.as_ref().filter(|s| !s.is_done) {
            let left: Vec<String> = stop.awaited_hosts.iter().map(HostId::to_string).collect();
            if !left.is_empty() {
                self.log_warning(format!("no report in time from: {}", left.join(", ")));
            }
            self.shut_down_now("time is up");
        }
    }

    /// Shuts this daemon down immediately. Its tasker kills the remaining processes when the
    /// connection to the daemon breaks.
    pub(super) fn shut_down_now(&mut self, why: &str) {
        if self.shutdown.as_ref().is_some_and(|s| s.is_done) {
            return;
        }
        let text = format!("this daemon ends now: {why}");
        // The end of an orderly shutdown is no fault.
        if self.shutdown.is_some() {
            self.log(text);
        } else {
            self.log_warning(text);
        }
        if self.shutdown.is_none() {
            self.signal_unspawned_tasks();
        }
        for tid in self.spawned_processes() {
            self.send_to_tasker(ToTasker::Kill { tid });
        }
        if let Some(master) = &self.master {
            let mut hosts: BTreeSet<HostId> = self.other_hosts().into_iter().collect();
            hosts.extend(master.host_changes.hosts_outside_table());
            for host in hosts {
                self.send_to_host(host, HostMsg::Shutdown);
            }
        }
        for conn in self.conns.ids() {
            self.outputs.push_back(Output::CloseTask { conn });
        }
        self.shutdown = Some(ShutdownState {
            why: why.to_string(),
            awaited_hosts: BTreeSet::new(),
            no_tasks_reported: true,
            is_done: true,
        });
        self.outputs.push_back(Output::Shutdown);
    }
}
