//! The end: of the virtual machine, of a deleted host, of a daemon that is told to stop.
//!
//! Tasks are asked to end and, if they do not, killed. A slave then tells the master that it has nothing left and waits
//! for the last word; the master waits for all, but not for ever. Programs from a command line are asked once, as PVM does
//! it, and waited for by nobody: they were not started by us, and what they do then is their affair.

use super::tasks::Task;
use super::{Machine, Output, Timer};
use sempa_proto::host::HostMsg;
use sempa_proto::task::AtEnd;
use sempa_proto::tasker::ToTasker;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeSet;

/// Time that tasks have to end by themselves.
const GRACE_TIME: Micros = Micros::from_millis(500);
/// Time after which a daemon ends, whatever is left; its tasker kills what it still has.
const STOP_TIME: Micros = Micros::from_secs(5);
/// Signal of a polite end.
const SIGTERM: i32 = 15;

/// A daemon that is ending.
#[derive(Debug)]
pub(super) struct Stop {
    why: String,
    /// Master: hosts that have not said that they have nothing left.
    waiting: BTreeSet<HostId>,
    /// Slave: it has said so.
    said: bool,
    over: bool,
}

impl Machine {
    /// Somebody outside wants this daemon to end; that of the master is that of the virtual machine.
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

    /// Ends this daemon in good order.
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

    /// Asks the tasks to end that are no processes of ours, but for those that want to be told by their calls.
    fn signal_others(&mut self) {
        let wants =
            |t: &&Task| !t.spawned() && (t.by_tasker.is_some() || t.at_end == AtEnd::Signalled);
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

    /// Tasks here that have a process of ours.
    fn processes(&self) -> Vec<Tid> {
        self.tasks
            .live
            .values()
            .filter(|t| t.spawned() && t.exited.is_none() && !t.is_away())
            .map(|t| t.tid)
            .collect()
    }

    /// The time of grace is over.
    pub(super) fn grace_over(&mut self) {
        if self.stop.as_ref().is_some_and(|s| !s.over) {
            for tid in self.processes() {
                self.tell_tasker(ToTasker::Kill { tid });
            }
        }
    }

    /// Goes on with the end when nothing is left to wait for.
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

    /// Another daemon has no task left and leaves.
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

    /// Master: a host that is lost has nothing to say any more.
    pub(super) fn lost_while_stopping(&mut self, host: HostId) {
        if let Some(stop) = &mut self.stop {
            stop.waiting.remove(&host);
            self.stop_step();
        }
    }

    /// Time is up: what is left is left to the tasker.
    pub(super) fn stop_deadline(&mut self) {
        if let Some(stop) = self.stop.as_ref().filter(|s| !s.over) {
            let left: Vec<String> = stop.waiting.iter().map(HostId::to_string).collect();
            if !left.is_empty() {
                self.log(format!("not heard of in time: {}", left.join(", ")));
            }
            self.shut_down("time is up");
        }
    }

    /// Ends this daemon now. Its tasker kills what it still has when it loses the daemon.
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
