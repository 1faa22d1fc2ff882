//! The master's management of the host table: starts daemons, adds them to the table and removes
//! them.
//!
//! - The daemons of one request are started in parallel. The daemons that have started are added
//!   with the next change of the table when all starts have ended, at the latest [`JOIN_DELAY`]
//!   after the first of them: a host that does not answer delays no other host.
//! - Changes are made one at a time, in two phases (prepare, commit), each change under a new
//!   epoch. Additions and removals that are requested during a change wait for the next change.
//! - If a host is lost during a change, the change continues without this host.

mod lost;

use super::hostfile::HostFile;
use super::{HostPlan, Machine, Output, StartId, StartedHost, Timer};
use sempa_proto::event::EventKind;
use sempa_proto::host::HostMsg;
use sempa_proto::table::{AddedHost, HOSTS_MAX, HostEntry, HostTable};
use sempa_proto::task::Reply;
use sempa_proto::{Epoch, HostId, Micros, PvmError, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// Time limit for the start of a daemon, from the order to start it.
const START_TIMEOUT: Micros = Micros::from_secs(120);
/// Time limit for a daemon that a person starts. Such daemons are requested one at a time, so the
/// time limit of each daemon grows by this value for every other manual start that is still open.
const MANUAL_START_TIMEOUT: Micros = Micros::from_secs(660);
/// Time limit for a started daemon to establish its session. The daemon's own time limit is
/// slightly shorter.
const CONNECT_TIMEOUT: Micros = Micros::from_secs(40);
/// Time for which a started host waits for the other hosts of its request. Hosts that join
/// together need one change of the table, and one notification for each task that watches for new
/// hosts.
const JOIN_DELAY: Micros = Micros::from_millis(500);
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
    /// The host file, with the number of its invalid lines.
    HostFile {
        refused_line_count: u32,
    },
}

/// Requests from the host file, served at the start.
#[derive(Debug)]
pub(super) struct HostFileStart {
    pub(super) host_names: Vec<String>,
    /// Invalid lines, each with the reason.
    pub(super) invalid_lines: Vec<(String, String)>,
}

#[derive(Debug)]
struct StartAttempt {
    request_number: u64,
    slot: usize,
    plan: HostPlan,
    started_host: Option<StartedHost>,
    is_connected: bool,
    /// Deadline of the current phase: start or connection.
    deadline: Micros,
}

/// A host whose daemon has started and that waits for the next table change.
#[derive(Clone, Debug)]
struct JoiningHost {
    request_number: u64,
    slot: usize,
    entry: HostEntry,
}

#[derive(Debug)]
struct AddRequest {
    requester: AddRequester,
    host_names: Vec<String>,
    results: Vec<Option<AddedHost>>,
    /// Number of start attempts in progress.
    attempt_count: usize,
    ready_hosts: Vec<JoiningHost>,
}

#[derive(Debug)]
struct DeleteRequest {
    requester: Tid,
    request_id: RequestId,
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
    pub(super) host_file: HostFile,
    /// Requests of the host file; `None` after they are processed. They are processed with the
    /// first event, because that event sets the time of day.
    host_file_start: Option<HostFileStart>,
    last_host_index: u16,
    last_start_id: u64,
    last_request_number: u64,
    start_attempts: BTreeMap<StartId, StartAttempt>,
    add_requests: BTreeMap<u64, AddRequest>,
    delete_requests: Vec<DeleteRequest>,
    pending_adds: Vec<JoiningHost>,
    pending_removals: Vec<Removal>,
    table_change: Option<TableChange>,
    /// Hosts that are not in the table any more and were ordered to end, but have not ended yet.
    pub(super) leaving_hosts: BTreeSet<HostId>,
}

impl HostChanges {
    /// Creates the state for a table that contains only the master, host 1.
    pub(super) fn new(file: HostFile, host_file_start: Option<HostFileStart>) -> Self {
        Self {
            host_file: file,
            host_file_start,
            last_host_index: HostId::MASTER.index(),
            ..Self::default()
        }
    }

    /// Returns the hosts that have a session, or will have one soon, but are not in the table in
    /// force.
    pub(super) fn hosts_outside_table(&self) -> Vec<HostId> {
        let starting_hosts = self
            .start_attempts
            .values()
            .filter(|s| s.is_connected)
            .map(|s| s.plan.id);
        let ready_hosts = self
            .add_requests
            .values()
            .flat_map(|a| a.ready_hosts.iter())
            .chain(&self.pending_adds);
        let uncommitted_hosts = self
            .table_change
            .iter()
            .filter(|c| !c.is_committed)
            .flat_map(|c| c.added_hosts.iter());
        starting_hosts
            .chain(ready_hosts.chain(uncommitted_hosts).map(|j| j.entry.id))
            .chain(self.leaving_hosts.iter().copied())
            .collect()
    }

    /// Returns the new hosts of a change that is not committed. They must also be notified of
    /// migrations.
    pub(super) fn joining_hosts(&self) -> Vec<HostId> {
        self.table_change
            .iter()
            .filter(|c| !c.is_committed)
            .flat_map(|c| c.added_hosts.iter().map(|j| j.entry.id))
            .collect()
    }

    fn is_name_taken(&self, name: &str) -> bool {
        let joining_hosts = self
            .add_requests
            .values()
            .flat_map(|a| a.ready_hosts.iter())
            .chain(&self.pending_adds);
        let changing_hosts = self.table_change.iter().flat_map(|c| c.added_hosts.iter());
        self.start_attempts.values().any(|s| s.plan.name == name)
            || joining_hosts
                .chain(changing_hosts)
                .any(|j| j.entry.name == name)
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

    /// Master: reports the invalid lines of the host file, and starts the hosts of its valid
    /// lines.
    pub(super) fn process_host_file(&mut self) {
        let Some(host_file_start) = self
            .master
            .as_mut()
            .and_then(|master| master.host_changes.host_file_start.take())
        else {
            return;
        };
        let refused_line_count = host_file_start.invalid_lines.len() as u32;
        for (line, why) in host_file_start.invalid_lines {
            self.log_warning(format!("the host file's line {line:?} was ignored: {why}"));
            self.record_event(EventKind::HostRefused { name: line, why });
        }
        self.add_hosts(
            &host_file_start.host_names,
            AddRequester::HostFile { refused_line_count },
        );
    }

    /// Starts the daemons of the hosts that these lines describe. The requester gets its reply
    /// when each host has joined or failed. An invalid line, or a host that cannot be added, gets
    /// an error as its result.
    pub(super) fn add_hosts(&mut self, lines: &[String], requester: AddRequester) {
        let is_shutting_down = self.shutdown.is_some();
        let changes = self.host_changes();
        changes.last_request_number += 1;
        let request_number = changes.last_request_number;
        let is_full = changes.add_requests.len() >= ADD_REQUESTS_MAX;
        let add_request = AddRequest {
            requester,
            host_names: lines.to_vec(),
            results: vec![None; lines.len()],
            attempt_count: 0,
            ready_hosts: Vec::new(),
        };
        changes.add_requests.insert(request_number, add_request);
        let mut plans = Vec::new();
        for (slot, line) in lines.iter().enumerate() {
            let plan_result = if is_shutting_down {
                Err((
                    PvmError::DSysErr,
                    "the virtual machine is being halted".to_string(),
                ))
            } else if is_full {
                Err((
                    PvmError::OutOfRes,
                    format!("{ADD_REQUESTS_MAX} requests to add hosts are open already"),
                ))
            } else {
                self.plan_host(line)
            };
            match plan_result {
                Ok(plan) => plans.push(self.register_start(request_number, slot, plan)),
                Err((error, reason)) => {
                    self.record_add_failure(request_number, slot, error, reason)
                }
            }
        }
        self.start_daemons(plans);
        self.advance_add_request(request_number);
    }

    /// Returns the plan of a start attempt; `None` if the daemon has already started or the
    /// attempt has ended.
    pub(super) fn plan_of_start(&self, start: StartId) -> Option<HostPlan> {
        let attempts = &self.master.as_ref()?.host_changes.start_attempts;
        attempts
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
        let plan = self.host_changes().host_file.plan(line, id)?;
        if self.table.find_by_name(&plan.name).is_some()
            || self.host_changes().is_name_taken(&plan.name)
        {
            return Err((
                PvmError::DupHost,
                format!("{} is in the virtual machine already", plan.name),
            ));
        }
        self.host_changes().last_host_index = index;
        Ok(plan)
    }

    fn register_start(
        &mut self,
        request_number: u64,
        slot: usize,
        plan: HostPlan,
    ) -> (StartId, HostPlan) {
        let now = self.now;
        let changes = self.host_changes();
        let open_manual_start_count = changes
            .start_attempts
            .values()
            .filter(|s| s.plan.is_manual() && s.started_host.is_none())
            .count() as u64;
        let timeout = if plan.is_manual() {
            Micros(MANUAL_START_TIMEOUT.0 * (open_manual_start_count + 1))
        } else {
            START_TIMEOUT
        };
        let deadline = now + timeout;
        changes.last_start_id += 1;
        let start_id = StartId(changes.last_start_id);
        if let Some(add_request) = changes.add_requests.get_mut(&request_number) {
            add_request.attempt_count += 1;
            add_request.host_names[slot] = plan.name.clone();
        }
        let attempt = StartAttempt {
            request_number,
            slot,
            plan: plan.clone(),
            started_host: None,
            is_connected: false,
            deadline,
        };
        changes.start_attempts.insert(start_id, attempt);
        self.set_timer(timeout, Timer::HostStartTimeout(start_id));
        (start_id, plan)
    }

    fn record_add_failure(
        &mut self,
        request_number: u64,
        slot: usize,
        error: PvmError,
        reason: String,
    ) {
        let Some(add_request) = self.host_changes().add_requests.get_mut(&request_number) else {
            return;
        };
        let name = add_request.host_names[slot].clone();
        add_request.results[slot] = Some(AddedHost {
            result: Err(error),
            reason: reason.clone(),
        });
        self.log_warning(format!("{name} was not added: {reason}"));
        self.record_event(EventKind::HostRefused { name, why: reason });
    }

    /// Handles the result of an attempt to start a daemon. After a success the daemon must
    /// establish its session within [`CONNECT_TIMEOUT`].
    pub(super) fn handle_host_started(
        &mut self,
        start: StartId,
        result: Result<StartedHost, (PvmError, String)>,
    ) {
        if self.master.is_none() {
            return;
        }
        match result {
            Ok(started_host) => {
                let deadline = self.now + CONNECT_TIMEOUT;
                if let Some(attempt) = self.host_changes().start_attempts.get_mut(&start) {
                    (attempt.started_host, attempt.deadline) = (Some(started_host), deadline);
                    self.set_timer(CONNECT_TIMEOUT, Timer::HostStartTimeout(start));
                    self.advance_start(start);
                }
            }
            Err((error, reason)) => self.fail_start(start, error, reason),
        }
    }

    /// Handles a new session with a host: repeats what may have been lost with the previous
    /// session, and continues the start of a new daemon. The master ends the session of a host
    /// that is not being added.
    pub(super) fn handle_host_connected(&mut self, host: HostId) {
        self.resend_requests_to(host);
        self.recheck_watches_on(host);
        self.repeat_forwarded_items(host);
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
        let changes = self.host_changes();
        if !changes
            .start_attempts
            .get(&start)
            .is_some_and(|s| s.is_connected && s.started_host.is_some())
        {
            return;
        }
        let Some(StartAttempt {
            request_number,
            slot,
            plan,
            started_host: Some(started_host),
            ..
        }) = changes.start_attempts.remove(&start)
        else {
            return;
        };
        let entry = HostEntry {
            id: plan.id,
            name: plan.name,
            arch: started_host.arch,
            speed: plan.speed,
            dsig: started_host.dsig,
            addresses: started_host.addresses,
        };
        let mut is_first_ready_host = false;
        if let Some(add_request) = changes.add_requests.get_mut(&request_number) {
            is_first_ready_host = add_request.ready_hosts.is_empty();
            add_request.attempt_count -= 1;
            add_request.ready_hosts.push(JoiningHost {
                request_number,
                slot,
                entry,
            });
        }
        if is_first_ready_host {
            self.set_timer(JOIN_DELAY, Timer::JoinReadyHosts(request_number));
        }
        self.advance_add_request(request_number);
    }

    /// Adds the started hosts of a request with the next table change, although other hosts of the
    /// request have not started yet.
    pub(super) fn join_ready_hosts(&mut self, request_number: u64) {
        let changes = self.host_changes();
        let Some(add_request) = changes.add_requests.get_mut(&request_number) else {
            return;
        };
        let ready_hosts = std::mem::take(&mut add_request.ready_hosts);
        changes.pending_adds.extend(ready_hosts);
        self.begin_table_change();
    }

    /// Removes a start attempt that has failed, and records the error as the result for its host.
    fn fail_start(&mut self, start: StartId, error: PvmError, reason: String) {
        let Some(attempt) = self.host_changes().start_attempts.remove(&start) else {
            return;
        };
        if attempt.is_connected {
            self.outputs.push_back(Output::Disconnect {
                host: attempt.plan.id,
            });
        }
        if let Some(add_request) = self
            .host_changes()
            .add_requests
            .get_mut(&attempt.request_number)
        {
            add_request.attempt_count -= 1;
        }
        self.record_add_failure(attempt.request_number, attempt.slot, error, reason);
        self.advance_add_request(attempt.request_number);
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
        let (name, seconds) = (s.plan.name.clone(), |duration: Micros| {
            duration.0 / 1_000_000
        });
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

    /// Continues a request to add hosts when all its start attempts have ended: adds the started
    /// hosts with the next table change. When each host has a result, replies to the requester.
    fn advance_add_request(&mut self, request_number: u64) {
        let changes = self.host_changes();
        let is_not_first = changes.host_file_start.is_some()
            || changes
                .add_requests
                .keys()
                .next()
                .is_some_and(|first_number| *first_number != request_number);
        let Some(add_request) = changes
            .add_requests
            .get_mut(&request_number)
            .filter(|add_request| add_request.attempt_count == 0)
        else {
            return;
        };
        if is_not_first
            && add_request.results.is_empty()
            && matches!(add_request.requester, AddRequester::Task { .. })
        {
            // An empty request is answered after all earlier requests.
            return;
        }
        if !add_request.ready_hosts.is_empty() {
            return self.join_ready_hosts(request_number);
        }
        if add_request.results.iter().any(Option::is_none) {
            return;
        }
        let Some(AddRequest {
            requester, results, ..
        }) = changes.add_requests.remove(&request_number)
        else {
            return;
        };
        let added_hosts: Vec<AddedHost> = results.into_iter().flatten().collect();
        match requester {
            AddRequester::Task { tid, id } => self.reply(tid, id, Reply::HostsAdded(added_hosts)),
            AddRequester::Rm { rm, wid } => self.reply_hosts_added_to_rm(rm, wid, &added_hosts),
            AddRequester::HostFile {
                refused_line_count: refused_count,
            } => {
                let added_count = added_hosts
                    .iter()
                    .filter(|added_hosts| added_hosts.result.is_ok())
                    .count() as u32;
                let refused_count = refused_count + added_hosts.len() as u32 - added_count;
                self.record_event(EventKind::HostFileProcessed {
                    added: added_count,
                    refused: refused_count,
                });
            }
        }
        let empty_request_number = self
            .host_changes()
            .add_requests
            .first_key_value()
            .filter(|(_, add_request)| add_request.results.is_empty())
            .map(|(request_number, _)| *request_number);
        if let Some(request_number) = empty_request_number {
            self.advance_add_request(request_number);
        }
    }

    /// Handles the request of a task to delete hosts.
    pub(super) fn delete_hosts(&mut self, tid: Tid, id: RequestId, names: &[String]) {
        let mut remaining_hosts = BTreeSet::new();
        let mut results = Vec::new();
        for (n, name) in names.iter().enumerate() {
            // As in PVM, a dot stands for the host of the daemon that deletes hosts, which is the
            // master.
            let named_host = if name == "." {
                Some(HostId::MASTER)
            } else {
                self.table.find_by_name(name).map(|h| h.id)
            };
            results.push(match named_host {
                None => Err(PvmError::NoHost),
                Some(HostId::MASTER) => Err(PvmError::BadParam),
                Some(_) if names[..n].contains(name) => Err(PvmError::DupHost),
                Some(host) => {
                    remaining_hosts.insert(host);
                    Ok(())
                }
            });
        }
        for host in &remaining_hosts {
            self.roll_back_for_lost_host(*host);
            self.queue_removal(*host, format!("deleted by {tid}"), true);
        }
        self.host_changes().delete_requests.push(DeleteRequest {
            requester: tid,
            request_id: id,
            results,
            remaining_hosts,
        });
        self.answer_finished_deletes();
        self.begin_table_change();
    }

    fn answer_finished_deletes(&mut self) {
        let finished_requests: Vec<DeleteRequest> = self
            .host_changes()
            .delete_requests
            .extract_if(.., |d| d.remaining_hosts.is_empty())
            .collect();
        for DeleteRequest {
            requester: tid,
            request_id: id,
            results,
            ..
        } in finished_requests
        {
            self.reply(tid, id, Reply::HostsDeleted(results));
        }
    }

    /// Adds the removal of a host to the next table change, unless a removal is already queued or
    /// in progress. The host is ordered to end only if all requests for its removal require this.
    fn queue_removal(&mut self, host: HostId, why: String, must_halt: bool) {
        let changes = self.host_changes();
        let current_removals = changes
            .table_change
            .iter_mut()
            .filter(|c| !c.is_committed)
            .flat_map(|c| c.removals.iter_mut());
        match changes
            .pending_removals
            .iter_mut()
            .chain(current_removals)
            .find(|r| r.host == host)
        {
            Some(removal) => removal.must_halt &= must_halt,
            None => changes.pending_removals.push(Removal {
                host,
                why,
                must_halt,
            }),
        }
    }

    /// Begins the next change if additions or removals are queued and no change is in progress.
    fn begin_table_change(&mut self) {
        let changes = self.host_changes();
        if changes.table_change.is_some()
            || (changes.pending_adds.is_empty() && changes.pending_removals.is_empty())
        {
            return;
        }
        let (added_hosts, mut removals) = (
            std::mem::take(&mut changes.pending_adds),
            std::mem::take(&mut changes.pending_removals),
        );
        removals.retain(|r| self.table.get(r.host).is_some());
        let mut table = HostTable {
            epoch: self.next_epoch(),
            hosts: self.table.hosts.clone(),
        };
        table
            .hosts
            .retain(|h| !removals.iter().any(|r| r.host == h.id));
        table
            .hosts
            .extend(added_hosts.iter().map(|j| j.entry.clone()));
        table.hosts.sort_by_key(|h| h.id);
        let awaited_hosts: BTreeSet<HostId> = table
            .hosts
            .iter()
            .map(|h| h.id)
            .filter(|id| *id != HostId::MASTER)
            .collect();
        for host in &awaited_hosts {
            let is_new_host = added_hosts.iter().any(|j| j.entry.id == *host);
            let locations = if is_new_host {
                self.locations.all_locations()
            } else {
                Vec::new()
            };
            let reserved_ids_max = self.reserved_ids_max_of(*host);
            self.send_to_host(
                *host,
                HostMsg::PrepareTable {
                    table: table.clone(),
                    locations,
                    rm: self.rm_state.vm_wide_rm,
                    reserved_local_max: reserved_ids_max,
                },
            );
        }
        self.host_changes().table_change = Some(TableChange {
            table,
            added_hosts,
            removals,
            is_committed: false,
            awaited_hosts,
        });
        self.advance_table_change();
    }

    /// Increments the epoch. Returns the epoch of the next order to all daemons.
    pub(super) fn next_epoch(&mut self) -> Epoch {
        self.epoch = self.epoch.next();
        self.epoch
    }

    /// Handles a host's acknowledgement of the prepare phase, or, if `is_commit` is true, of the
    /// commit phase.
    pub(super) fn handle_change_ack(&mut self, host: HostId, epoch: Epoch, is_commit: bool) {
        let Some(master) = &mut self.master else {
            return;
        };
        let change = master
            .host_changes
            .table_change
            .as_mut()
            .filter(|c| c.table.epoch == epoch && c.is_committed == is_commit);
        if change.is_some_and(|c| c.awaited_hosts.remove(&host)) {
            self.advance_table_change();
        }
    }

    /// Continues the current change when all hosts have acknowledged its phase.
    fn advance_table_change(&mut self) {
        let Some(change) = self
            .host_changes()
            .table_change
            .as_mut()
            .filter(|c| c.awaited_hosts.is_empty())
        else {
            return;
        };
        if change.is_committed {
            return self.finish_table_change();
        }
        change.is_committed = true;
        let (table, removals) = (change.table.clone(), change.removals.clone());
        change.awaited_hosts = table
            .hosts
            .iter()
            .map(|h| h.id)
            .filter(|id| *id != HostId::MASTER)
            .collect();
        let (awaited_hosts, epoch) = (change.awaited_hosts.clone(), table.epoch);
        for host in awaited_hosts {
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
            .extend(removals.iter().filter(|r| r.must_halt).map(|r| r.host));
        self.apply_table(table);
        for Removal {
            host,
            why,
            must_halt,
        } in removals
        {
            let name = names.get(&host).cloned().unwrap_or_default();
            self.record_event(EventKind::HostGone {
                host,
                name,
                why: why.clone(),
                lost_tasks: self.tasks_lost_with(host),
            });
            self.report_lost_host_to_rm(host);
            if must_halt {
                self.send_to_host(host, HostMsg::Halt { reason: why });
                self.set_timer(REMOVAL_TIMEOUT, Timer::HostRemovalTimeout(host));
            } else {
                self.finish_removal(host);
            }
        }
        self.advance_table_change();
    }

    fn finish_table_change(&mut self) {
        let Some(change) = self.host_changes().table_change.take() else {
            return;
        };
        if !change.added_hosts.is_empty() {
            self.retry_stuck_jobs();
        }
        for JoiningHost {
            request_number,
            slot,
            entry,
        } in change.added_hosts
        {
            self.send_recent_exits(entry.id);
            self.record_event(EventKind::HostAdded {
                host: entry.id,
                name: entry.name.clone(),
            });
            if let Some(add_request) = self.host_changes().add_requests.get_mut(&request_number) {
                add_request.results[slot] = Some(AddedHost {
                    result: Ok(entry),
                    reason: String::new(),
                });
            }
            self.advance_add_request(request_number);
        }
        self.begin_table_change();
    }

    /// True for a deleted host whose session still exists. Closing the session is the last action
    /// of a daemon. Afterwards a new daemon may be started on the same machine.
    pub(super) fn is_leaving(&self, host: HostId) -> bool {
        self.master
            .as_ref()
            .is_some_and(|master| master.host_changes.leaving_hosts.contains(&host))
    }

    /// Completes the removal of a host whose daemon has ended.
    pub(super) fn finish_removal(&mut self, host: HostId) {
        self.host_changes().leaving_hosts.remove(&host);
        self.outputs.push_back(Output::Disconnect { host });
        for request in &mut self.host_changes().delete_requests {
            request.remaining_hosts.remove(&host);
        }
        self.answer_finished_deletes();
    }

    /// Completes a removal that timed out: the host is removed although its daemon has not ended.
    pub(super) fn handle_removal_timeout(&mut self, host: HostId) {
        if self.is_leaving(host) {
            self.log_warning(format!(
                "{host} did not end in time; it ends when its lease expires"
            ));
            self.record_lost_lease(host);
            self.finish_removal(host);
        }
    }

    /// Abandons all starts in progress, because the virtual machine shuts down.
    pub(super) fn abandon_starts(&mut self) {
        let start_ids: Vec<StartId> = self.host_changes().start_attempts.keys().copied().collect();
        for start in start_ids {
            self.outputs.push_back(Output::AbandonStart { start });
        }
    }
}
