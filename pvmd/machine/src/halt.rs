//! Orderly shutdown: of the virtual machine, of a deleted host, or of a daemon that receives a
//! signal.
//!
//! 1. Tasks are asked to exit. Those that remain after [`GRACE_TIME`] are killed.
//! 2. A slave that has no tasks left reports that to the master and waits for the order to exit.
//! 3. The master waits for all slaves, but not longer than [`STOP_TIME`].
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

/// Time that tasks have to exit before they are killed.
const GRACE_TIME: Micros = Micros::from_millis(500);
/// Time after which a daemon exits in any case. Its tasker then kills the remaining processes.
const STOP_TIME: Micros = Micros::from_secs(5);
const SIGTERM: i32 = 15;

/// Progress of the shutdown of this daemon.
#[derive(Debug)]
pub(super) struct Stop {
    why: String,
    /// Master: hosts that have not reported that they have no tasks left.
    waiting: BTreeSet<HostId>,
    /// Slave: it has reported that it has no tasks left.
    said: bool,
    over: bool,
}

impl Machine {
    /// Handles a stop request from outside, for example a signal. On the master it ends the virtual
    /// machine.
    pub(super) fn stop_asked(&mut self, why: &str) {
        if self.master.is_some() {
            self.halt(why)
        } else {
            self.end_by_order(why)
        }
    }

    /// Master: ends the virtual machine.
    pub(super) fn halt(&mut self, why: &str) {
        if self.stop.is_some() {
            return;
        }
        self.log(format!("the virtual machine is being halted: {why}"));
        let mut waiting: BTreeSet<HostId> = self.other_hosts().into_iter().collect();
        if let Some(master) = &self.master {
            waiting.extend(master.hosts.outside());
        }
        for host in &waiting {
            self.tell_host(
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
    pub(super) fn end_by_order(&mut self, why: &str) {
        if self.stop.is_none() {
            self.log(format!("this daemon ends: {why}"));
            self.begin_stop(why, BTreeSet::new());
        }
    }

    fn begin_stop(&mut self, why: &str, waiting: BTreeSet<HostId>) {
        self.stop = Some(Stop {
            why: why.to_string(),
            waiting,
            said: false,
            over: false,
        });
        self.timer(GRACE_TIME, Timer::Grace);
        self.timer(STOP_TIME, Timer::Stop);
        for tid in self.processes() {
            self.tell_tasker(ToTasker::Signal {
                tid,
                signal: SIGTERM,
            });
        }
        self.signal_others();
        self.stop_step();
    }

    /// Sends SIGTERM to the tasks that this daemon's tasker has not started, except those that want
    /// their calls to fail instead.
    fn signal_others(&mut self) {
        let wants = |t: &&Task| {
            !t.spawned() && (t.by_tasker.is_some() || t.at_end == OnDaemonExit::Terminate)
        };
        let conns: Vec<_> = self
            .tasks
            .live
            .values()
            .filter(wants)
            .filter_map(Task::conn)
            .collect();
        for conn in conns {
            self.out.push_back(Output::Signal {
                conn,
                signal: SIGTERM,
            });
        }
    }

    /// Returns the tasks whose processes this daemon's tasker has started.
    fn processes(&self) -> Vec<Tid> {
        self.tasks
            .live
            .values()
            .filter(|t| t.spawned() && t.exited.is_none() && !t.is_away())
            .map(|t| t.tid)
            .collect()
    }

    /// Kills the remaining tasks at the end of the grace period.
    pub(super) fn grace_over(&mut self) {
        if self.stop.as_ref().is_some_and(|s| !s.over) {
            for tid in self.processes() {
                self.tell_tasker(ToTasker::Kill { tid });
            }
        }
    }

    /// Continues the shutdown if nothing remains to wait for.
    pub(super) fn stop_step(&mut self) {
        let tasks_left = !self.tasker_gone && !self.processes().is_empty();
        let Some(stop) = &mut self.stop else { return };
        if tasks_left || stop.over {
            return;
        }
        if self.master.is_none() {
            if !std::mem::replace(&mut stop.said, true) {
                let why = stop.why.clone();
                self.tell_host(HostId::MASTER, HostMsg::Leaving { why });
            }
        } else if stop.waiting.is_empty() {
            self.shut_down("all hosts have ended their tasks");
        }
    }

    /// Handles the report of a host that it has no tasks left and leaves.
    pub(super) fn host_leaving(&mut self, host: HostId, why: &str) {
        if self.master.is_none() {
            return;
        }
        if let Some(stop) = &mut self.stop {
            stop.waiting.remove(&host);
            return self.stop_step();
        }
        self.tell_host(host, HostMsg::Shutdown);
        self.coordinator_lost(host);
        if !self.is_leaving(host) {
            self.jobs_lost_host(host);
            self.host_out(host, why);
        }
    }

    /// Master: waits no longer for a host that was lost.
    pub(super) fn lost_while_stopping(&mut self, host: HostId) {
        if let Some(stop) = &mut self.stop {
            stop.waiting.remove(&host);
            self.stop_step();
        }
    }

    /// Exits although hosts or processes remain. The tasker kills the processes.
    pub(super) fn stop_deadline(&mut self) {
        if let Some(stop) = self.stop.as_ref().filter(|s| !s.over) {
            let left: Vec<String> = stop.waiting.iter().map(HostId::to_string).collect();
            if !left.is_empty() {
                self.log(format!("not heard of in time: {}", left.join(", ")));
            }
            self.shut_down("time is up");
        }
    }

    /// Shuts this daemon down immediately. Its tasker kills the remaining processes when the
    /// connection to the daemon breaks.
    pub(super) fn shut_down(&mut self, why: &str) {
        if self.stop.as_ref().is_some_and(|s| s.over) {
            return;
        }
        self.log(format!("this daemon ends now: {why}"));
        if self.stop.is_none() {
            self.signal_others();
        }
        for tid in self.processes() {
            self.tell_tasker(ToTasker::Kill { tid });
        }
        if let Some(master) = &self.master {
            let mut hosts: BTreeSet<HostId> = self.other_hosts().into_iter().collect();
            hosts.extend(master.hosts.outside());
            for host in hosts {
                self.tell_host(host, HostMsg::Shutdown);
            }
        }
        for conn in self.conns.ids() {
            self.out.push_back(Output::CloseTask { conn });
        }
        self.stop = Some(Stop {
            why: why.to_string(),
            waiting: BTreeSet::new(),
            said: true,
            over: true,
        });
        self.out.push_back(Output::Shutdown);
    }
}
