//! The master's management of the host table: starts daemons, adds them to the table and removes
//! them.
//!
//! - The daemons of one request are started in parallel. When all have started or failed, they are
//!   added with the next change of the table.
//! - Changes are made one at a time, in two phases (prepare, commit), each change under a new
//!   epoch. Additions and removals that are requested during a change wait for the next one.
//! - If a host is lost during a change, the change continues without this host.

use super::hostfile::HostFile;
use super::{HostPlan, Machine, Output, StartId, StartedHost, Timer};
use sempa_proto::event::EventKind;
use sempa_proto::host::HostMsg;
use sempa_proto::table::{AddedHost, HOSTS_MAX, HostEntry, HostTable};
use sempa_proto::task::Reply;
use sempa_proto::{Epoch, HostId, Micros, PvmError, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// Time limit for a daemon to start, from the order to start it.
const START_TIMEOUT: Micros = Micros::from_secs(120);
/// Time limit for a daemon that a person starts. Such daemons are requested one at a time, so the
/// time limit of each grows by this value for every earlier one that is still waiting.
const MANUAL_START_TIMEOUT: Micros = Micros::from_secs(660);
/// Time for a started daemon to establish its session. The daemon itself gives up slightly earlier.
const CONNECT_TIMEOUT: Micros = Micros::from_secs(40);
/// Time limit for a deleted host to end its tasks.
const REMOVAL_TIMEOUT: Micros = Micros::from_secs(10);
/// Largest number of open requests to add hosts.
const ADD_REQUESTS_MAX: usize = 1024;

/// Origin of a request to add hosts.
#[derive(Clone, Copy, Debug)]
pub(super) enum AddRequester {
    Task {
        tid: Tid,
        id: RequestId,
    },
    Rm {
        rm: Tid,
        wid: i32,
    },
    /// The host file. `refused` is the number of its invalid lines.
    HostFile {
        refused: u32,
    },
}

/// Requests from the host file, served at the start.
#[derive(Debug)]
pub(super) struct HostFileStart {
    pub(super) hosts: Vec<String>,
    /// Lines that are not valid, with the reason.
    pub(super) invalid_lines: Vec<(String, String)>,
}

#[derive(Debug)]
struct StartAttempt {
    request: u64,
    slot: usize,
    plan: HostPlan,
    started_host: Option<StartedHost>,
    is_connected: bool,
    /// Deadline of the current phase: start or connection.
    deadline: Micros,
}

/// A started host that is waiting for the next table change.
#[derive(Clone, Debug)]
struct JoiningHost {
    request: u64,
    slot: usize,
    entry: HostEntry,
}

#[derive(Debug)]
struct AddRequest {
    requester: AddRequester,
    names: Vec<String>,
    results: Vec<Option<AddedHost>>,
    /// Number of attempts in progress.
    starting_count: usize,
    ready_hosts: Vec<JoiningHost>,
}

#[derive(Debug)]
struct DeleteRequest {
    tid: Tid,
    id: RequestId,
    results: Vec<Result<(), PvmError>>,
    remaining_hosts: BTreeSet<HostId>,
}

#[derive(Clone, Debug)]
struct Removal {
    host: HostId,
    why: String,
    /// True if the host is alive and must be ordered to end.
    must_halt: bool,
}

#[derive(Debug)]
struct TableChange {
    table: HostTable,
    added_hosts: Vec<JoiningHost>,
    removals: Vec<Removal>,
    is_committed: bool,
    /// Hosts that have not acknowledged the current phase.
    awaited_hosts: BTreeSet<HostId>,
}

/// Hosts that are being added to the virtual machine or removed from it.
#[derive(Debug, Default)]
pub(super) struct HostChanges {
    pub(super) file: HostFile,
    /// Requests of the host file; processed with the first event, because that event sets the time
    /// of day.
    host_file_start: Option<HostFileStart>,
    last_host_index: u16,
    last_start_id: u64,
    last_request_number: u64,
    start_attempts: BTreeMap<StartId, StartAttempt>,
    add_requests: BTreeMap<u64, AddRequest>,
    delete_requests: Vec<DeleteRequest>,
    pending_adds: Vec<JoiningHost>,
    pending_removals: Vec<Removal>,
    change: Option<TableChange>,
    /// Hosts that are out of the table and were ordered to end, but have not ended yet.
    leaving_hosts: BTreeSet<HostId>,
}

impl HostChanges {
    /// Creates the state for a table that contains only the master, host 1.
    pub(super) fn new(file: HostFile, host_file_start: Option<HostFileStart>) -> HostChanges {
        HostChanges {
            file,
            host_file_start,
            last_host_index: HostId::MASTER.index(),
            ..HostChanges::default()
        }
    }

    /// Returns the hosts that have a session, or will soon, but are not in the table in force.
    pub(super) fn hosts_outside_table(&self) -> Vec<HostId> {
        let starting = self
            .start_attempts
            .values()
            .filter(|s| s.is_connected)
            .map(|s| s.plan.id);
        let ready = self
            .add_requests
            .values()
            .flat_map(|a| a.ready_hosts.iter())
            .chain(&self.pending_adds);
        let changing = self
            .change
            .iter()
            .filter(|c| !c.is_committed)
            .flat_map(|c| c.added_hosts.iter());
        starting
            .chain(ready.chain(changing).map(|j| j.entry.id))
            .chain(self.leaving_hosts.iter().copied())
            .collect()
    }

    /// Returns the new hosts of a change that is not committed. They must be notified of migrations
    /// as well.
    pub(super) fn joining_hosts(&self) -> Vec<HostId> {
        self.change
            .iter()
            .filter(|c| !c.is_committed)
            .flat_map(|c| c.added_hosts.iter().map(|j| j.entry.id))
            .collect()
    }

    fn is_name_taken(&self, name: &str) -> bool {
        let joining = self
            .add_requests
            .values()
            .flat_map(|a| a.ready_hosts.iter())
            .chain(&self.pending_adds);
        let changing = self.change.iter().flat_map(|c| c.added_hosts.iter());
        self.start_attempts.values().any(|s| s.plan.name == name)
            || joining.chain(changing).any(|j| j.entry.name == name)
    }
}

impl Machine {
    fn host_changes(&mut self) -> &mut HostChanges {
        &mut self
            .master
            .as_mut()
            .expect("only the master changes the host table")
            .host_changes
    }

    /// Master: reports the invalid lines of the host file, and starts the hosts on the valid ones.
    pub(super) fn process_host_file(&mut self) {
        let Some(begin) = self
            .master
            .as_mut()
            .and_then(|master| master.host_changes.host_file_start.take())
        else {
            return;
        };
        let refused = begin.invalid_lines.len() as u32;
        for (line, why) in begin.invalid_lines {
            self.log_warning(format!("the host file's line {line:?} was ignored: {why}"));
            self.record(EventKind::HostRefused { name: line, why });
        }
        self.add_hosts(&begin.hosts, AddRequester::HostFile { refused });
    }

    /// Starts the daemons of these hosts and adds them to the table.
    pub(super) fn add_hosts(&mut self, lines: &[String], requester: AddRequester) {
        let stopping = self.shutdown.is_some();
        let hosts = self.host_changes();
        hosts.last_request_number += 1;
        let number = hosts.last_request_number;
        let full = hosts.add_requests.len() >= ADD_REQUESTS_MAX;
        let job = AddRequest {
            requester,
            names: lines.to_vec(),
            results: vec![None; lines.len()],
            starting_count: 0,
            ready_hosts: Vec::new(),
        };
        hosts.add_requests.insert(number, job);
        let mut plans = Vec::new();
        for (slot, line) in lines.iter().enumerate() {
            let planned = if stopping {
                Err((
                    PvmError::DSysErr,
                    "the virtual machine is being halted".to_string(),
                ))
            } else if full {
                Err((
                    PvmError::OutOfRes,
                    format!("{ADD_REQUESTS_MAX} requests to add hosts are open already"),
                ))
            } else {
                self.plan_host(line)
            };
            match planned {
                Ok(plan) => plans.push(self.start_host(number, slot, plan)),
                Err((error, reason)) => self.fail_slot(number, slot, error, reason),
            }
        }
        self.start_daemons(plans);
        self.advance_add_request(number);
    }

    /// Returns the plan of a start attempt in progress.
    pub(super) fn plan_of_start(&self, start: StartId) -> Option<HostPlan> {
        let starting = &self.master.as_ref()?.host_changes.start_attempts;
        starting
            .get(&start)
            .filter(|s| s.started_host.is_none())
            .map(|s| s.plan.clone())
    }

    fn plan_host(&mut self, line: &str) -> Result<HostPlan, (PvmError, String)> {
        let index = self.host_changes().last_host_index + 1;
        let Some(id) = HostId::new(index) else {
            return Err((
                PvmError::OutOfRes,
                format!("{HOSTS_MAX} hosts have been added; that is all a tid can name"),
            ));
        };
        let plan = self.host_changes().file.plan(line, id)?;
        if self.table.by_name(&plan.name).is_some() || self.host_changes().is_name_taken(&plan.name)
        {
            return Err((
                PvmError::DupHost,
                format!("{} is in the virtual machine already", plan.name),
            ));
        }
        self.host_changes().last_host_index = index;
        Ok(plan)
    }

    fn start_host(&mut self, request: u64, slot: usize, plan: HostPlan) -> (StartId, HostPlan) {
        let now = self.now;
        let hosts = self.host_changes();
        let before = hosts
            .start_attempts
            .values()
            .filter(|s| s.plan.is_manual() && s.started_host.is_none())
            .count() as u64;
        let time = if plan.is_manual() {
            Micros(MANUAL_START_TIMEOUT.0 * (before + 1))
        } else {
            START_TIMEOUT
        };
        let deadline = now + time;
        hosts.last_start_id += 1;
        let start = StartId(hosts.last_start_id);
        if let Some(add) = hosts.add_requests.get_mut(&request) {
            add.starting_count += 1;
            add.names[slot] = plan.name.clone();
        }
        let attempt = StartAttempt {
            request,
            slot,
            plan: plan.clone(),
            started_host: None,
            is_connected: false,
            deadline,
        };
        hosts.start_attempts.insert(start, attempt);
        self.set_timer(time, Timer::HostStart(start));
        (start, plan)
    }

    fn fail_slot(&mut self, job: u64, slot: usize, error: PvmError, reason: String) {
        let Some(add) = self.host_changes().add_requests.get_mut(&job) else {
            return;
        };
        let name = add.names[slot].clone();
        add.results[slot] = Some(AddedHost {
            result: Err(error),
            reason: reason.clone(),
        });
        self.log_warning(format!("{name} was not added: {reason}"));
        self.record(EventKind::HostRefused { name, why: reason });
    }

    /// Handles the result of an attempt to start a daemon.
    pub(super) fn handle_host_started(
        &mut self,
        start: StartId,
        result: Result<StartedHost, (PvmError, String)>,
    ) {
        if self.master.is_none() {
            return;
        }
        match result {
            Ok(started) => {
                let until = self.now + CONNECT_TIMEOUT;
                if let Some(s) = self.host_changes().start_attempts.get_mut(&start) {
                    (s.started_host, s.deadline) = (Some(started), until);
                    self.set_timer(CONNECT_TIMEOUT, Timer::HostStart(start));
                    self.advance_start(start);
                }
            }
            Err((error, reason)) => self.fail_start(start, error, reason),
        }
    }

    /// Handles a new session with a host.
    pub(super) fn handle_host_connected(&mut self, host: HostId) {
        self.resend_requests_to(host);
        self.repeat_forwarded(host);
        if self.master.is_some() && self.shutdown.is_some() && self.table.get(host).is_none() {
            return self.send_to_host(host, HostMsg::Shutdown);
        }
        self.send_tracer_to(host);
        let Some(master) = &mut self.master else {
            return;
        };
        let start = master
            .host_changes
            .start_attempts
            .iter_mut()
            .find(|(_, s)| s.plan.id == host);
        if let Some((start, s)) = start {
            s.is_connected = true;
            let start = *start;
            self.advance_start(start);
        } else if self.table.get(host).is_none()
            && !self.host_changes().hosts_outside_table().contains(&host)
        {
            self.log_warning(format!(
                "{host} connected, but is not being added; its session was ended"
            ));
            self.outputs.push_back(Output::Disconnect { host });
        }
    }

    fn advance_start(&mut self, start: StartId) {
        let hosts = self.host_changes();
        if !hosts
            .start_attempts
            .get(&start)
            .is_some_and(|s| s.is_connected && s.started_host.is_some())
        {
            return;
        }
        let Some(StartAttempt {
            request,
            slot,
            plan,
            started_host: Some(started),
            ..
        }) = hosts.start_attempts.remove(&start)
        else {
            return;
        };
        let entry = HostEntry {
            id: plan.id,
            name: plan.name,
            arch: started.arch,
            speed: plan.speed,
            dsig: started.dsig,
            addresses: started.addresses,
        };
        if let Some(add) = hosts.add_requests.get_mut(&request) {
            add.starting_count -= 1;
            add.ready_hosts.push(JoiningHost {
                request,
                slot,
                entry,
            });
        }
        self.advance_add_request(request);
    }

    /// Removes a start attempt that has failed, and records the error as the result for its host.
    fn fail_start(&mut self, start: StartId, error: PvmError, reason: String) {
        let Some(s) = self.host_changes().start_attempts.remove(&start) else {
            return;
        };
        if s.is_connected {
            self.outputs
                .push_back(Output::Disconnect { host: s.plan.id });
        }
        if let Some(add) = self.host_changes().add_requests.get_mut(&s.request) {
            add.starting_count -= 1;
        }
        self.fail_slot(s.request, s.slot, error, reason);
        self.advance_add_request(s.request);
    }

    /// Fails a start attempt whose deadline has passed.
    pub(super) fn handle_start_timeout(&mut self, start: StartId) {
        let attempt = self
            .master
            .as_ref()
            .and_then(|m| m.host_changes.start_attempts.get(&start));
        let Some(s) = attempt.filter(|s| s.deadline <= self.now) else {
            return;
        };
        let (name, seconds) = (s.plan.name.clone(), |time: Micros| time.0 / 1_000_000);
        let reason = if s.started_host.is_some() {
            let seconds = seconds(CONNECT_TIMEOUT);
            format!(
                "the daemon on {name} started, but did not connect within {seconds} s: UDP from there to this host is \
                 blocked, or another program answers"
            )
        } else if s.plan.is_manual() {
            format!("the daemon on {name} was not started by hand in time")
        } else {
            format!(
                "the daemon on {name} did not start within {} s",
                seconds(START_TIMEOUT)
            )
        };
        self.outputs.push_back(Output::AbandonStart { start });
        self.fail_start(start, PvmError::CantStart, reason);
    }

    /// Continues a request to add hosts when all its start attempts have ended.
    fn advance_add_request(&mut self, job: u64) {
        let hosts = self.host_changes();
        let is_not_first = hosts.host_file_start.is_some()
            || hosts
                .add_requests
                .keys()
                .next()
                .is_some_and(|first| *first != job);
        let Some(add) = hosts
            .add_requests
            .get_mut(&job)
            .filter(|add| add.starting_count == 0)
        else {
            return;
        };
        if is_not_first
            && add.results.is_empty()
            && matches!(add.requester, AddRequester::Task { .. })
        {
            // An empty request is answered after all earlier ones.
            return;
        }
        let ready = std::mem::take(&mut add.ready_hosts);
        if !ready.is_empty() {
            hosts.pending_adds.extend(ready);
            return self.begin_table_change();
        }
        if add.results.iter().any(Option::is_none) {
            return;
        }
        let Some(AddRequest {
            requester, results, ..
        }) = hosts.add_requests.remove(&job)
        else {
            return;
        };
        let added: Vec<AddedHost> = results.into_iter().flatten().collect();
        match requester {
            AddRequester::Task { tid, id } => self.reply(tid, id, Reply::HostsAdded(added)),
            AddRequester::Rm { rm, wid } => self.reply_hosts_added_to_rm(rm, wid, &added),
            AddRequester::HostFile { refused } => {
                let joined = added.iter().filter(|added| added.result.is_ok()).count() as u32;
                let refused = refused + added.len() as u32 - joined;
                self.record(EventKind::HostFileProcessed {
                    added: joined,
                    refused,
                });
            }
        }
        let empty_request = self
            .host_changes()
            .add_requests
            .first_key_value()
            .filter(|(_, add)| add.results.is_empty())
            .map(|(job, _)| *job);
        if let Some(job) = empty_request {
            self.advance_add_request(job);
        }
    }

    /// Handles the request of a task to delete hosts.
    pub(super) fn delete_hosts(&mut self, tid: Tid, id: RequestId, names: &[String]) {
        let mut remaining = BTreeSet::new();
        let mut results = Vec::new();
        for (n, name) in names.iter().enumerate() {
            // As in PVM, a dot stands for the daemon that deletes hosts, whichever task requests
            // it.
            let named = if name == "." {
                Some(HostId::MASTER)
            } else {
                self.table.by_name(name).map(|h| h.id)
            };
            results.push(match named {
                None => Err(PvmError::NoHost),
                Some(HostId::MASTER) => Err(PvmError::BadParam),
                Some(_) if names[..n].contains(name) => Err(PvmError::DupHost),
                Some(host) => {
                    remaining.insert(host);
                    Ok(())
                }
            });
        }
        for host in &remaining {
            self.roll_back_for_lost_host(*host);
            self.queue_removal(*host, format!("deleted by {tid}"), true);
        }
        self.host_changes().delete_requests.push(DeleteRequest {
            tid,
            id,
            results,
            remaining_hosts: remaining,
        });
        self.finish_deletes();
        self.begin_table_change();
    }

    fn finish_deletes(&mut self) {
        let done: Vec<DeleteRequest> = self
            .host_changes()
            .delete_requests
            .extract_if(.., |d| d.remaining_hosts.is_empty())
            .collect();
        for DeleteRequest {
            tid, id, results, ..
        } in done
        {
            self.reply(tid, id, Reply::HostsDeleted(results));
        }
    }

    /// Adds the removal of a host to the next table change.
    fn queue_removal(&mut self, host: HostId, why: String, must_halt: bool) {
        let hosts = self.host_changes();
        let under_way = hosts
            .change
            .iter_mut()
            .filter(|c| !c.is_committed)
            .flat_map(|c| c.removals.iter_mut());
        match hosts
            .pending_removals
            .iter_mut()
            .chain(under_way)
            .find(|r| r.host == host)
        {
            Some(removal) => removal.must_halt &= must_halt,
            None => hosts.pending_removals.push(Removal {
                host,
                why,
                must_halt,
            }),
        }
    }

    /// Begins the next change if one is needed and none is in progress.
    fn begin_table_change(&mut self) {
        let hosts = self.host_changes();
        if hosts.change.is_some()
            || (hosts.pending_adds.is_empty() && hosts.pending_removals.is_empty())
        {
            return;
        }
        let (added, mut removed) = (
            std::mem::take(&mut hosts.pending_adds),
            std::mem::take(&mut hosts.pending_removals),
        );
        removed.retain(|r| self.table.get(r.host).is_some());
        let mut table = HostTable {
            epoch: self.next_epoch(),
            hosts: self.table.hosts.clone(),
        };
        table
            .hosts
            .retain(|h| !removed.iter().any(|r| r.host == h.id));
        table.hosts.extend(added.iter().map(|j| j.entry.clone()));
        table.hosts.sort_by_key(|h| h.id);
        let awaited_hosts: BTreeSet<HostId> = table
            .hosts
            .iter()
            .map(|h| h.id)
            .filter(|id| *id != HostId::MASTER)
            .collect();
        for host in &awaited_hosts {
            let new = added.iter().any(|j| j.entry.id == *host);
            let locations = if new {
                self.locations.all()
            } else {
                Vec::new()
            };
            let spared = self.reserved_ids_of(*host);
            self.send_to_host(
                *host,
                HostMsg::PrepareTable {
                    table: table.clone(),
                    locations,
                    rm: self.rm.vm_wide_rm,
                    reserved_ids_max: spared,
                },
            );
        }
        self.host_changes().change = Some(TableChange {
            table,
            added_hosts: added,
            removals: removed,
            is_committed: false,
            awaited_hosts,
        });
        self.advance_table_change();
    }

    /// Returns the epoch of the next order to all daemons.
    pub(super) fn next_epoch(&mut self) -> Epoch {
        self.epoch = self.epoch.next();
        self.epoch
    }

    /// Handles a host's acknowledgement of the prepare phase or the commit phase.
    pub(super) fn handle_change_ack(&mut self, host: HostId, epoch: Epoch, committed: bool) {
        let Some(master) = &mut self.master else {
            return;
        };
        let change = master
            .host_changes
            .change
            .as_mut()
            .filter(|c| c.table.epoch == epoch && c.is_committed == committed);
        if change.is_some_and(|c| c.awaited_hosts.remove(&host)) {
            self.advance_table_change();
        }
    }

    /// Continues the current change when all hosts have acknowledged its phase.
    fn advance_table_change(&mut self) {
        let Some(change) = self
            .host_changes()
            .change
            .as_mut()
            .filter(|c| c.awaited_hosts.is_empty())
        else {
            return;
        };
        if change.is_committed {
            return self.finish_table_change();
        }
        change.is_committed = true;
        let (table, remove) = (change.table.clone(), change.removals.clone());
        change.awaited_hosts = table
            .hosts
            .iter()
            .map(|h| h.id)
            .filter(|id| *id != HostId::MASTER)
            .collect();
        let (waiting, epoch) = (change.awaited_hosts.clone(), table.epoch);
        for host in waiting {
            self.send_to_host(host, HostMsg::CommitTable { epoch });
        }
        let names: BTreeMap<HostId, String> = self
            .table
            .hosts
            .iter()
            .map(|h| (h.id, h.name.clone()))
            .collect();
        self.host_changes()
            .leaving_hosts
            .extend(remove.iter().filter(|r| r.must_halt).map(|r| r.host));
        self.apply_table(table);
        for Removal {
            host,
            why,
            must_halt,
        } in remove
        {
            let name = names.get(&host).cloned().unwrap_or_default();
            self.record(EventKind::HostGone {
                host,
                name,
                why: why.clone(),
            });
            self.report_lost_host_to_rm(host);
            if must_halt {
                self.send_to_host(host, HostMsg::Halt { why });
                self.set_timer(REMOVAL_TIMEOUT, Timer::HostRemoval(host));
            } else {
                self.finish_removal(host);
            }
        }
        self.advance_table_change();
    }

    fn finish_table_change(&mut self) {
        let Some(change) = self.host_changes().change.take() else {
            return;
        };
        if !change.added_hosts.is_empty() {
            self.retry_stuck_jobs();
        }
        for JoiningHost {
            request,
            slot,
            entry,
        } in change.added_hosts
        {
            self.send_recent_exits(entry.id);
            self.record(EventKind::HostAdded {
                host: entry.id,
                name: entry.name.clone(),
            });
            if let Some(add) = self.host_changes().add_requests.get_mut(&request) {
                add.results[slot] = Some(AddedHost {
                    result: Ok(entry),
                    reason: String::new(),
                });
            }
            self.advance_add_request(request);
        }
        self.begin_table_change();
    }

    /// True for a deleted host whose session still exists. A daemon closes its session as the last
    /// action, so afterwards a new daemon may be started on the same machine.
    pub(super) fn is_leaving(&self, host: HostId) -> bool {
        self.master
            .as_ref()
            .is_some_and(|master| master.host_changes.leaving_hosts.contains(&host))
    }

    /// Completes the removal of a host whose daemon has ended.
    pub(super) fn finish_removal(&mut self, host: HostId) {
        self.host_changes().leaving_hosts.remove(&host);
        self.outputs.push_back(Output::Disconnect { host });
        self.host_changes()
            .delete_requests
            .iter_mut()
            .for_each(|d| {
                d.remaining_hosts.remove(&host);
            });
        self.finish_deletes();
    }

    /// Completes a removal that timed out: the host is removed although its daemon has not ended.
    pub(super) fn handle_removal_timeout(&mut self, host: HostId) {
        if self.is_leaving(host) {
            self.log_warning(format!(
                "{host} did not end in time; it ends when its lease expires"
            ));
            self.finish_removal(host);
        }
    }

    /// Master: removes a host that was lost or has shut down.
    pub(super) fn remove_lost_host(&mut self, host: HostId, why: &str) {
        if self.is_leaving(host) {
            return self.finish_removal(host);
        }
        let start = self
            .host_changes()
            .start_attempts
            .iter()
            .find(|(_, s)| s.plan.id == host)
            .map(|(start, _)| *start);
        if let Some(start) = start {
            self.outputs.push_back(Output::AbandonStart { start });
            return self.fail_start(
                start,
                PvmError::CantStart,
                format!("its daemon was lost: {why}"),
            );
        }
        self.drop_joining_host(host, why);
        if let Some(change) = &mut self.host_changes().change {
            if change.is_committed {
                change.awaited_hosts.remove(&host);
            } else {
                // The host cannot acknowledge the change any more, so the change begins again
                // without it.
                let change = self.host_changes().change.take().expect("just seen");
                let hosts = self.host_changes();
                hosts.pending_adds.splice(..0, change.added_hosts);
                hosts.pending_removals.splice(..0, change.removals);
                self.drop_joining_host(host, why);
            }
        }
        if self.table.get(host).is_some() {
            self.queue_removal(host, why.to_string(), false);
        }
        self.advance_table_change();
        self.begin_table_change();
    }

    /// Drops a lost host that was started but is in no table yet.
    fn drop_joining_host(&mut self, host: HostId, why: &str) {
        let hosts = self.host_changes();
        let waiting = hosts.pending_adds.extract_if(.., |j| j.entry.id == host);
        let ready = hosts
            .add_requests
            .values_mut()
            .flat_map(|a| a.ready_hosts.extract_if(.., |j| j.entry.id == host));
        let dropped: Vec<JoiningHost> = waiting.chain(ready).collect();
        for JoiningHost { request, slot, .. } in dropped {
            self.outputs.push_back(Output::Disconnect { host });
            self.fail_slot(
                request,
                slot,
                PvmError::CantStart,
                format!("its daemon was lost: {why}"),
            );
            self.advance_add_request(request);
        }
    }

    /// Abandons all starts in progress, because the virtual machine ends.
    pub(super) fn abandon_starts(&mut self) {
        let starts: Vec<StartId> = self.host_changes().start_attempts.keys().copied().collect();
        for start in starts {
            self.outputs.push_back(Output::AbandonStart { start });
        }
    }
}
