//! Orderly shutdown: of the virtual machine, of a deleted host, or of a daemon that receives a
//! signal.
//!
//! 1. Tasks are asked to exit. Tasks that remain after [`EXIT_GRACE_TIMEOUT`] are killed.
//! 2. A slave whose tasks have all ended reports this to the master and waits for the order to
//!    exit.
//! 3. The master waits for all slaves, but not longer than [`STOP_TIMEOUT`].
//!
//! Programs that were started from a command line are asked once, as in PVM. The daemon did not
//! start them, so it does not wait for them or kill them.

use super::tasks::Task;
use super::{Machine, Output, Timer};
use sempa_proto::host::HostMsg;
use sempa_proto::task::{OnDaemonExit, Reply};
use sempa_proto::tasker::ToTasker;
use sempa_proto::{HostId, Micros, RequestId, Tid};
use std::collections::BTreeSet;

/// Time for tasks to exit before they are killed.
const EXIT_GRACE_TIMEOUT: Micros = Micros::from_millis(500);
/// Time after which a daemon exits even if tasks or hosts remain. Its tasker then kills the
/// remaining processes.
const STOP_TIMEOUT: Micros = Micros::from_secs(5);
const SIGTERM: i32 = 15;

/// Progress of the shutdown of this daemon.
#[derive(Debug)]
pub(super) struct ShutdownState {
    why: String,
    /// Master: hosts that have not reported that all their tasks have ended.
    awaited_hosts: BTreeSet<HostId>,
    /// Master: hosts that were lost before they reported the end of their tasks.
    lost_hosts: BTreeSet<HostId>,
    /// Master: the request that is answered at the end.
    waiter: Option<(Tid, RequestId)>,
    /// Slave: true if this daemon has reported that all its tasks have ended.
    has_reported_end: bool,
    is_done: bool,
}

impl Machine {
    /// Handles a request to stop this daemon that comes from outside the virtual machine, for
    /// example a signal. On the master the request ends the virtual machine.
    pub(super) fn handle_stop_request(&mut self, why: &str) {
        if self.master.is_some() {
            self.halt_vm(why)
        } else {
            self.shut_down_orderly(why)
        }
    }

    /// Master: ends the virtual machine. Orders all other hosts to halt, abandons the start of
    /// further daemons, and begins the shutdown of this daemon.
    pub(super) fn halt_vm(&mut self, why: &str) {
        if self.shutdown.is_some() {
            return;
        }
        self.log(format!("the virtual machine is being halted: {why}"));
        let mut awaited_hosts: BTreeSet<HostId> = self.other_hosts().into_iter().collect();
        if let Some(master) = &self.master {
            awaited_hosts.extend(master.host_changes.hosts_outside_table());
        }
        for host in &awaited_hosts {
            self.send_to_host(
                *host,
                HostMsg::Halt {
                    reason: why.to_string(),
                },
            );
        }
        self.abandon_starts();
        self.begin_stop(why, awaited_hosts);
    }

    /// Master: ends the virtual machine, and replies at the end. If it already ends for another
    /// request with such a reply, this one is answered at once.
    pub(super) fn halt_and_report(&mut self, tid: Tid, id: RequestId) {
        self.halt_vm(&format!("requested by {tid}"));
        let shutdown = self.shutdown.as_mut().filter(|shutdown| !shutdown.is_done);
        match shutdown {
            Some(shutdown) if shutdown.waiter.is_none() => shutdown.waiter = Some((tid, id)),
            _ => self.reply(
                tid,
                id,
                Reply::Halted {
                    missing_hosts: Vec::new(),
                },
            ),
        }
    }

    /// Master: answers the request that waits for the end.
    fn report_halt(&mut self) {
        let Some(shutdown) = &mut self.shutdown else {
            return;
        };
        let Some((tid, id)) = shutdown.waiter.take() else {
            return;
        };
        let missing_hosts = shutdown.awaited_hosts.union(&shutdown.lost_hosts);
        let host_name = |id: &HostId| {
            self.table
                .get(*id)
                .map_or_else(|| id.to_string(), |host| host.name.clone())
        };
        let missing_hosts = missing_hosts.map(host_name).collect();
        self.reply(tid, id, Reply::Halted { missing_hosts });
    }

    /// Begins an orderly shutdown of this daemon, unless a shutdown is already in progress.
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
            lost_hosts: BTreeSet::new(),
            waiter: None,
            has_reported_end: false,
            is_done: false,
        });
        self.set_timer(EXIT_GRACE_TIMEOUT, Timer::ExitGraceTimeout);
        self.set_timer(STOP_TIMEOUT, Timer::DaemonStopTimeout);
        for tid in self.spawned_processes() {
            self.send_to_tasker(ToTasker::Signal {
                tid,
                signal: SIGTERM,
            });
        }
        self.signal_unspawned_tasks();
        self.advance_stop();
    }

    /// Sends SIGTERM to the tasks that this daemon's tasker has not started, except those whose
    /// calls must fail instead.
    fn signal_unspawned_tasks(&mut self) {
        let must_be_signaled = |t: &&Task| {
            !t.is_spawned() && (t.tasker.is_some() || t.on_daemon_exit == OnDaemonExit::Terminate)
        };
        let conns: Vec<_> = self
            .tasks
            .live_tasks
            .values()
            .filter(must_be_signaled)
            .filter_map(Task::conn)
            .collect();
        for conn in conns {
            self.outputs.push_back(Output::SendSignal {
                conn,
                signal: SIGTERM,
            });
        }
    }

    /// True if this daemon has only to exit.
    fn is_shutdown_done(&self) -> bool {
        self.shutdown.as_ref().is_some_and(|s| s.is_done)
    }

    /// True if all tasks of this daemon have ended and no further tasks will start.
    pub(super) fn has_ended_tasks(&self) -> bool {
        self.shutdown
            .as_ref()
            .is_some_and(|s| s.is_done || s.has_reported_end)
    }

    /// Returns the tasks whose processes this daemon's tasker has started.
    fn spawned_processes(&self) -> Vec<Tid> {
        self.tasks
            .live_tasks
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

    /// Continues the shutdown when this daemon no longer waits for a task. A slave reports to the
    /// master that its tasks have ended. The master exits when it waits for no host either.
    pub(super) fn advance_stop(&mut self) {
        let has_tasks = !self.tasker_has_ended && !self.spawned_processes().is_empty();
        let Some(shutdown) = &mut self.shutdown else {
            return;
        };
        if has_tasks || shutdown.is_done {
            return;
        }
        if self.master.is_none() {
            if !std::mem::replace(&mut shutdown.has_reported_end, true) {
                let why = shutdown.why.clone();
                self.send_to_host(HostId::MASTER, HostMsg::Leaving { reason: why });
            }
        } else if shutdown.awaited_hosts.is_empty() {
            self.shut_down_now("all hosts have ended their tasks");
        }
    }

    /// Master: handles the report of a host that all its tasks have ended and that it shuts down.
    /// If the virtual machine is not being halted, lets the host exit and removes it from the host
    /// table.
    pub(super) fn handle_host_leaving(&mut self, host: HostId, why: &str) {
        if self.master.is_none() {
            return;
        }
        self.forget_lease(host);
        if let Some(shutdown) = &mut self.shutdown {
            shutdown.awaited_hosts.remove(&host);
            return self.advance_stop();
        }
        self.send_to_host(host, HostMsg::Shutdown);
        self.notify_coordinators_of_lost_host(host);
        if !self.is_leaving(host) {
            self.roll_back_for_lost_host(host);
            self.remove_lost_host(host, why);
        }
    }

    /// Master: true if the virtual machine ends and no task can run on any other host: all have
    /// reported the end of their tasks, and the leases of lost hosts are over.
    pub fn have_other_hosts_ended(&self) -> bool {
        let are_reported = self
            .shutdown
            .as_ref()
            .is_some_and(|shutdown| shutdown.awaited_hosts.is_empty());
        self.master.is_some() && are_reported && self.lost_tasks_wait().is_none()
    }

    /// Master: stops waiting for a host that was lost.
    pub(super) fn stop_awaiting_host(&mut self, host: HostId) {
        if let Some(shutdown) = &mut self.shutdown {
            if shutdown.awaited_hosts.remove(&host) {
                shutdown.lost_hosts.insert(host);
            }
            self.advance_stop();
        }
    }

    /// Exits although hosts or processes remain. The tasker kills the processes.
    pub(super) fn handle_stop_timeout(&mut self) {
        if let Some(shutdown) = self.shutdown.as_ref().filter(|s| !s.is_done) {
            let remaining_hosts: Vec<String> = shutdown
                .awaited_hosts
                .iter()
                .map(HostId::to_string)
                .collect();
            if !remaining_hosts.is_empty() {
                self.log_warning(format!(
                    "no report in time from: {}",
                    remaining_hosts.join(", ")
                ));
            }
            self.shut_down_now("time is up");
        }
    }

    /// Shuts this daemon down immediately. Its tasker kills the remaining processes when the
    /// connection to the daemon breaks.
    pub(super) fn shut_down_now(&mut self, why: &str) {
        if self.is_shutdown_done() {
            return;
        }
        self.report_halt();
        let text = format!("this daemon ends now: {why}");
        // The end of an orderly shutdown is not logged as a warning.
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
        for conn in self.conns.connection_ids() {
            self.outputs.push_back(Output::CloseTask { conn });
        }
        self.shutdown = Some(ShutdownState {
            why: why.to_string(),
            awaited_hosts: BTreeSet::new(),
            lost_hosts: BTreeSet::new(),
            waiter: None,
            has_reported_end: true,
            is_done: true,
        });
        self.outputs.push_back(Output::Shutdown);
    }
}
