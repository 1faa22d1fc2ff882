//! The master's management of the host table: starts daemons, adds them to the table and removes
//! them.
//!
//! - The daemons of one request are started in parallel. When all have started or failed, they are
//!   added with the next change of the table.
//! - Changes are made one at a time, in two phases (prepare, commit), each change under a new
//!   epoch. Additions and removals that are requested during a change wait for the next one.
//! - A host that is lost during a change is left out of it.

use super::hostfile::HostFile;
use super::{HostPlan, Machine, Output, StartId, StartedHost, Timer};
use sempa_proto::event::EventKind;
use sempa_proto::host::HostMsg;
use sempa_proto::table::{AddedHost, HOSTS_MAX, HostEntry, HostTable};
use sempa_proto::task::Reply;
use sempa_proto::{Epoch, HostId, Micros, PvmError, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// Time from the order to start a daemon until it must have started.
const START_TIME: Micros = Micros::from_secs(120);
/// The same for a daemon that a person starts. Such daemons are requested one at a time, so each
/// one that waits adds this time.
const HAND_TIME: Micros = Micros::from_secs(660);
/// Time for a started daemon to establish its session. The daemon itself gives up slightly earlier.
const CONNECT_TIME: Micros = Micros::from_secs(40);
/// Time for a deleted host to end its tasks.
const DISMISS_TIME: Micros = Micros::from_secs(10);
/// Largest number of open requests to add hosts.
const ADDS_OPEN_MAX: usize = 1024;

/// Origin of a request to add hosts.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wanting {
    Task {
        tid: Tid,
        id: RequestId,
    },
    Rm {
        rm: Tid,
        wid: i32,
    },
    /// The host file; `refused` of its lines were not valid.
    HostFile {
        refused: u32,
    },
}

/// Requests from the host file, served at the start.
#[derive(Debug)]
pub(super) struct HostFileBegin {
    pub(super) start: Vec<String>,
    /// Lines that are not valid, with the reason.
    pub(super) ignored: Vec<(String, String)>,
}

#[derive(Debug)]
struct Starting {
    job: u64,
    slot: usize,
    plan: HostPlan,
    started: Option<StartedHost>,
    connected: bool,
    /// Deadline of the current phase.
    until: Micros,
}

/// A started host that is waiting for the next table change.
#[derive(Clone, Debug)]
struct Joining {
    job: u64,
    slot: usize,
    entry: HostEntry,
}

#[derive(Debug)]
struct AddJob {
    wanting: Wanting,
    names: Vec<String>,
    slots: Vec<Option<AddedHost>>,
    /// Number of attempts in progress.
    starting: usize,
    ready: Vec<Joining>,
}

#[derive(Debug)]
struct DelJob {
    tid: Tid,
    id: RequestId,
    results: Vec<Result<(), PvmError>>,
    open: BTreeSet<HostId>,
}

#[derive(Clone, Debug)]
struct Removal {
    host: HostId,
    why: String,
    /// The host is alive and must be told to end.
    dismiss: bool,
}

/// A table change in progress.
#[derive(Debug)]
struct Change {
    table: HostTable,
    add: Vec<Joining>,
    remove: Vec<Removal>,
    committed: bool,
    /// Hosts that have not acknowledged the current phase.
    waiting: BTreeSet<HostId>,
}

/// Hosts that are being added to the virtual machine or removed from it.
#[derive(Debug, Default)]
pub(super) struct Hosts {
    pub(super) file: HostFile,
    /// Processed with the first event, which brings the time of day.
    begin: Option<HostFileBegin>,
    last_index: u16,
    last_start: u64,
    last_job: u64,
    starting: BTreeMap<StartId, Starting>,
    adds: BTreeMap<u64, AddJob>,
    dels: Vec<DelJob>,
    wanted_add: Vec<Joining>,
    wanted_remove: Vec<Removal>,
    change: Option<Change>,
    /// Hosts that are out of the table and were told to end, but have not ended yet.
    leaving: BTreeSet<HostId>,
}

impl Hosts {
    /// Creates the state for a table that contains only the master, host 1.
    pub(super) fn new(file: HostFile, begin: Option<HostFileBegin>) -> Hosts {
        Hosts {
            file,
            begin,
            last_index: HostId::MASTER.index(),
            ..Hosts::default()
        }
    }

    /// Returns the hosts that have a session, or will soon, but are not in the table in force.
    pub(super) fn outside(&self) -> Vec<HostId> {
        let starting = self
            .starting
            .values()
            .filter(|s| s.connected)
            .map(|s| s.plan.id);
        let ready = self
            .adds
            .values()
            .flat_map(|a| a.ready.iter())
            .chain(&self.wanted_add);
        let changing = self
            .change
            .iter()
            .filter(|c| !c.committed)
            .flat_map(|c| c.add.iter());
        starting
            .chain(ready.chain(changing).map(|j| j.entry.id))
            .chain(self.leaving.iter().copied())
            .collect()
    }

    /// Returns the new hosts of a change that is not committed. They must be notified of migrations
    /// as well.
    pub(super) fn joining(&self) -> Vec<HostId> {
        self.change
            .iter()
            .filter(|c| !c.committed)
            .flat_map(|c| c.add.iter().map(|j| j.entry.id))
            .collect()
    }

    fn is_named(&self, name: &str) -> bool {
        let joining = self
            .adds
            .values()
            .flat_map(|a| a.ready.iter())
            .chain(&self.wanted_add);
        let changing = self.change.iter().flat_map(|c| c.add.iter());
        self.starting.values().any(|s| s.plan.name == name)
            || joining.chain(changing).any(|j| j.entry.name == name)
    }
}

impl Machine {
    fn hosts(&mut self) -> &mut Hosts {
        &mut self
            .master
            .as_mut()
            .expect("only the master changes the host table")
            .hosts
    }

    /// Master: reports the lines of the host file that are not valid, and starts the hosts on the
    /// others.
    pub(super) fn begin_host_file(&mut self) {
        let Some(begin) = self
            .master
            .as_mut()
            .and_then(|master| master.hosts.begin.take())
        else {
            return;
        };
        let refused = begin.ignored.len() as u32;
        for (line, why) in begin.ignored {
            self.log(format!("the host file's line {line:?} was ignored: {why}"));
            self.record(EventKind::HostRefused { name: line, why });
        }
        self.add_hosts(&begin.start, Wanting::HostFile { refused });
    }

    /// Starts the daemons of these hosts and adds them to the table.
    pub(super) fn add_hosts(&mut self, lines: &[String], wanting: Wanting) {
        let stopping = self.stop.is_some();
        let hosts = self.hosts();
        hosts.last_job += 1;
        let number = hosts.last_job;
        let full = hosts.adds.len() >= ADDS_OPEN_MAX;
        let job = AddJob {
            wanting,
            names: lines.to_vec(),
            slots: vec![None; lines.len()],
            starting: 0,
            ready: Vec::new(),
        };
        hosts.adds.insert(number, job);
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
                    format!("{ADDS_OPEN_MAX} requests to add hosts are open already"),
                ))
            } else {
                self.plan_host(line)
            };
            match planned {
                Ok(plan) => plans.push(self.start_host(number, slot, plan)),
                Err((error, reason)) => self.slot_failed(number, slot, error, reason),
            }
        }
        self.start_daemons(plans);
        self.add_step(number);
    }

    /// Returns the plan of a start attempt that has not produced a result.
    pub(super) fn plan_of(&self, start: StartId) -> Option<HostPlan> {
        let starting = &self.master.as_ref()?.hosts.starting;
        starting
            .get(&start)
            .filter(|s| s.started.is_none())
            .map(|s| s.plan.clone())
    }

    fn plan_host(&mut self, line: &str) -> Result<HostPlan, (PvmError, String)> {
        let index = self.hosts().last_index + 1;
        let Some(id) = HostId::new(index) else {
            return Err((
                PvmError::OutOfRes,
                format!("{HOSTS_MAX} hosts have been added; that is all a tid can name"),
            ));
        };
        let plan = self.hosts().file.plan(line, id)?;
        if self.table.by_name(&plan.name).is_some() || self.hosts().is_named(&plan.name) {
            return Err((
                PvmError::DupHost,
                format!("{} is in the virtual machine already", plan.name),
            ));
        }
        self.hosts().last_index = index;
        Ok(plan)
    }

    fn start_host(&mut self, job: u64, slot: usize, plan: HostPlan) -> (StartId, HostPlan) {
        let now = self.now;
        let hosts = self.hosts();
        let before = hosts
            .starting
            .values()
            .filter(|s| s.plan.by_hand() && s.started.is_none())
            .count() as u64;
        let time = if plan.by_hand() {
            Micros(HAND_TIME.0 * (before + 1))
        } else {
            START_TIME
        };
        let until = now + time;
        hosts.last_start += 1;
        let start = StartId(hosts.last_start);
        if let Some(add) = hosts.adds.get_mut(&job) {
            add.starting += 1;
            add.names[slot] = plan.name.clone();
        }
        let attempt = Starting {
            job,
            slot,
            plan: plan.clone(),
            started: None,
            connected: false,
            until,
        };
        hosts.starting.insert(start, attempt);
        self.timer(time, Timer::Start(start));
        (start, plan)
    }

    fn slot_failed(&mut self, job: u64, slot: usize, error: PvmError, reason: String) {
        let Some(add) = self.hosts().adds.get_mut(&job) else {
            return;
        };
        let name = add.names[slot].clone();
        add.slots[slot] = Some(AddedHost {
            result: Err(error),
            reason: reason.clone(),
        });
        self.log(format!("{name} was not added: {reason}"));
        self.record(EventKind::HostRefused { name, why: reason });
    }

    /// Handles the result of an attempt to start a daemon.
    pub(super) fn host_started(
        &mut self,
        start: StartId,
        result: Result<StartedHost, (PvmError, String)>,
    ) {
        if self.master.is_none() {
            return;
        }
        match result {
            Ok(started) => {
                let until = self.now + CONNECT_TIME;
                if let Some(s) = self.hosts().starting.get_mut(&start) {
                    (s.started, s.until) = (Some(started), until);
                    self.timer(CONNECT_TIME, Timer::Start(start));
                    self.start_step(start);
                }
            }
            Err((error, reason)) => self.start_over(start, error, reason),
        }
    }

    /// Handles a new session with a host.
    pub(super) fn host_connected(&mut self, host: HostId) {
        self.ask_again(host);
        self.hand_over_again(host);
        if self.master.is_some() && self.stop.is_some() && self.table.get(host).is_none() {
            return self.tell_host(host, HostMsg::Shutdown);
        }
        self.tell_of_tracer(host);
        let Some(master) = &mut self.master else {
            return;
        };
        let start = master
            .hosts
            .starting
            .iter_mut()
            .find(|(_, s)| s.plan.id == host);
        if let Some((start, s)) = start {
            s.connected = true;
            let start = *start;
            self.start_step(start);
        } else if self.table.get(host).is_none() && !self.hosts().outside().contains(&host) {
            self.log(format!(
                "{host} connected, but nobody wants it in; its session was ended"
            ));
            self.out.push_back(Output::Forget { host });
        }
    }

    fn start_step(&mut self, start: StartId) {
        let hosts = self.hosts();
        if !hosts
            .starting
            .get(&start)
            .is_some_and(|s| s.connected && s.started.is_some())
        {
            return;
        }
        let Some(Starting {
            job,
            slot,
            plan,
            started: Some(started),
            ..
        }) = hosts.starting.remove(&start)
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
        if let Some(add) = hosts.adds.get_mut(&job) {
            add.starting -= 1;
            add.ready.push(Joining { job, slot, entry });
        }
        self.add_step(job);
    }

    /// Ends a failed start attempt.
    fn start_over(&mut self, start: StartId, error: PvmError, reason: String) {
        let Some(s) = self.hosts().starting.remove(&start) else {
            return;
        };
        if s.connected {
            self.out.push_back(Output::Forget { host: s.plan.id });
        }
        if let Some(add) = self.hosts().adds.get_mut(&s.job) {
            add.starting -= 1;
        }
        self.slot_failed(s.job, s.slot, error, reason);
        self.add_step(s.job);
    }

    /// Fails a start attempt whose deadline has passed.
    pub(super) fn start_deadline(&mut self, start: StartId) {
        let attempt = self
            .master
            .as_ref()
            .and_then(|m| m.hosts.starting.get(&start));
        let Some(s) = attempt.filter(|s| s.until <= self.now) else {
            return;
        };
        let (name, seconds) = (s.plan.name.clone(), |time: Micros| time.0 / 1_000_000);
        let reason = if s.started.is_some() {
            let seconds = seconds(CONNECT_TIME);
            format!(
                "the daemon on {name} started, but did not connect within {seconds} s: its UDP way to here is closed, \
                 or somebody else answers at its end"
            )
        } else if s.plan.by_hand() {
            format!("nobody has started the daemon on {name} by hand in time")
        } else {
            format!(
                "the daemon on {name} did not start within {} s",
                seconds(START_TIME)
            )
        };
        self.out.push_back(Output::AbandonStart { start });
        self.start_over(start, PvmError::CantStart, reason);
    }

    /// Continues a request to add hosts.
    fn add_step(&mut self, job: u64) {
        let hosts = self.hosts();
        let others =
            hosts.begin.is_some() || hosts.adds.keys().next().is_some_and(|first| *first != job);
        let Some(add) = hosts.adds.get_mut(&job).filter(|add| add.starting == 0) else {
            return;
        };
        if others && add.slots.is_empty() && matches!(add.wanting, Wanting::Task { .. }) {
            // An empty request is answered after all earlier ones.
            return;
        }
        let ready = std::mem::take(&mut add.ready);
        if !ready.is_empty() {
            hosts.wanted_add.extend(ready);
            return self.try_change();
        }
        if add.slots.iter().any(Option::is_none) {
            return;
        }
        let Some(AddJob { wanting, slots, .. }) = hosts.adds.remove(&job) else {
            return;
        };
        let added: Vec<AddedHost> = slots.into_iter().flatten().collect();
        match wanting {
            Wanting::Task { tid, id } => self.reply(tid, id, Reply::HostsAdded(added)),
            Wanting::Rm { rm, wid } => self.rm_added(rm, wid, &added),
            Wanting::HostFile { refused } => {
                let joined = added.iter().filter(|added| added.result.is_ok()).count() as u32;
                let refused = refused + added.len() as u32 - joined;
                self.record(EventKind::HostFileProcessed {
                    added: joined,
                    refused,
                });
            }
        }
        let waits = self
            .hosts()
            .adds
            .first_key_value()
            .filter(|(_, add)| add.slots.is_empty())
            .map(|(job, _)| *job);
        if let Some(job) = waits {
            self.add_step(job);
        }
    }

    /// Removes hosts for a task.
    pub(super) fn delete_hosts(&mut self, tid: Tid, id: RequestId, names: &[String]) {
        let mut open = BTreeSet::new();
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
                    open.insert(host);
                    Ok(())
                }
            });
        }
        for host in &open {
            self.jobs_lost_host(*host);
            self.want_out(*host, format!("deleted by {tid}"), true);
        }
        self.hosts().dels.push(DelJob {
            tid,
            id,
            results,
            open,
        });
        self.delete_step();
        self.try_change();
    }

    fn delete_step(&mut self) {
        let done: Vec<DelJob> = self
            .hosts()
            .dels
            .extract_if(.., |d| d.open.is_empty())
            .collect();
        for DelJob {
            tid, id, results, ..
        } in done
        {
            self.reply(tid, id, Reply::HostsDeleted(results));
        }
    }

    /// Adds the removal of a host to the next table change.
    fn want_out(&mut self, host: HostId, why: String, dismiss: bool) {
        let hosts = self.hosts();
        let under_way = hosts
            .change
            .iter_mut()
            .filter(|c| !c.committed)
            .flat_map(|c| c.remove.iter_mut());
        match hosts
            .wanted_remove
            .iter_mut()
            .chain(under_way)
            .find(|r| r.host == host)
        {
            Some(removal) => removal.dismiss &= dismiss,
            None => hosts.wanted_remove.push(Removal { host, why, dismiss }),
        }
    }

    /// Begins the next change if one is needed and none is in progress.
    fn try_change(&mut self) {
        let hosts = self.hosts();
        if hosts.change.is_some() || (hosts.wanted_add.is_empty() && hosts.wanted_remove.is_empty())
        {
            return;
        }
        let (add, mut remove) = (
            std::mem::take(&mut hosts.wanted_add),
            std::mem::take(&mut hosts.wanted_remove),
        );
        remove.retain(|r| self.table.get(r.host).is_some());
        let mut table = HostTable {
            epoch: self.next_epoch(),
            hosts: self.table.hosts.clone(),
        };
        table
            .hosts
            .retain(|h| !remove.iter().any(|r| r.host == h.id));
        table.hosts.extend(add.iter().map(|j| j.entry.clone()));
        table.hosts.sort_by_key(|h| h.id);
        let waiting: BTreeSet<HostId> = table
            .hosts
            .iter()
            .map(|h| h.id)
            .filter(|id| *id != HostId::MASTER)
            .collect();
        for host in &waiting {
            let new = add.iter().any(|j| j.entry.id == *host);
            let locations = if new {
                self.locations.all()
            } else {
                Vec::new()
            };
            let spared = self.spared_on(*host);
            self.tell_host(
                *host,
                HostMsg::PrepareTable {
                    table: table.clone(),
                    locations,
                    rm: self.rm.wide,
                    reserved_ids_max: spared,
                },
            );
        }
        self.hosts().change = Some(Change {
            table,
            add,
            remove,
            committed: false,
            waiting,
        });
        self.change_step();
    }

    /// Returns the epoch of the next order to all daemons.
    pub(super) fn next_epoch(&mut self) -> Epoch {
        self.epoch = self.epoch.next();
        self.epoch
    }

    /// Handles a host's acknowledgement of the prepare phase or the commit phase.
    pub(super) fn change_heard(&mut self, host: HostId, epoch: Epoch, committed: bool) {
        let Some(master) = &mut self.master else {
            return;
        };
        let change = master
            .hosts
            .change
            .as_mut()
            .filter(|c| c.table.epoch == epoch && c.committed == committed);
        if change.is_some_and(|c| c.waiting.remove(&host)) {
            self.change_step();
        }
    }

    /// Continues the current change when all hosts have acknowledged its phase.
    fn change_step(&mut self) {
        let Some(change) = self
            .hosts()
            .change
            .as_mut()
            .filter(|c| c.waiting.is_empty())
        else {
            return;
        };
        if change.committed {
            return self.change_done();
        }
        change.committed = true;
        let (table, remove) = (change.table.clone(), change.remove.clone());
        change.waiting = table
            .hosts
            .iter()
            .map(|h| h.id)
            .filter(|id| *id != HostId::MASTER)
            .collect();
        let (waiting, epoch) = (change.waiting.clone(), table.epoch);
        for host in waiting {
            self.tell_host(host, HostMsg::CommitTable { epoch });
        }
        let names: BTreeMap<HostId, String> = self
            .table
            .hosts
            .iter()
            .map(|h| (h.id, h.name.clone()))
            .collect();
        self.hosts()
            .leaving
            .extend(remove.iter().filter(|r| r.dismiss).map(|r| r.host));
        self.apply_table(table);
        for Removal { host, why, dismiss } in remove {
            let name = names.get(&host).cloned().unwrap_or_default();
            self.record(EventKind::HostGone {
                host,
                name,
                why: why.clone(),
            });
            self.tell_rm_of_host(host);
            if dismiss {
                self.tell_host(host, HostMsg::Halt { why });
                self.timer(DISMISS_TIME, Timer::Dismissed(host));
            } else {
                self.host_finished(host);
            }
        }
        self.change_step();
    }

    fn change_done(&mut self) {
        let Some(change) = self.hosts().change.take() else {
            return;
        };
        if !change.add.is_empty() {
            self.jobs_got_hosts();
        }
        for Joining { job, slot, entry } in change.add {
            self.tell_of_ends(entry.id);
            self.record(EventKind::HostAdded {
                host: entry.id,
                name: entry.name.clone(),
            });
            if let Some(add) = self.hosts().adds.get_mut(&job) {
                add.slots[slot] = Some(AddedHost {
                    result: Ok(entry),
                    reason: String::new(),
                });
            }
            self.add_step(job);
        }
        self.try_change();
    }

    /// True for a deleted host whose session still exists. A daemon closes its session as the last
    /// action, so afterwards a new daemon may be started on the same machine.
    pub(super) fn is_leaving(&self, host: HostId) -> bool {
        self.master
            .as_ref()
            .is_some_and(|master| master.hosts.leaving.contains(&host))
    }

    /// Ends the removal of a host.
    pub(super) fn host_finished(&mut self, host: HostId) {
        self.hosts().leaving.remove(&host);
        self.out.push_back(Output::Forget { host });
        self.hosts().dels.iter_mut().for_each(|d| {
            d.open.remove(&host);
        });
        self.delete_step();
    }

    /// Ends the removal of a host that has not ended in time.
    pub(super) fn dismissed_deadline(&mut self, host: HostId) {
        if self.is_leaving(host) {
            self.log(format!(
                "{host} did not end in time; it ends by itself when it hears nothing from here"
            ));
            self.host_finished(host);
        }
    }

    /// Master: removes a host that was lost or has left.
    pub(super) fn host_out(&mut self, host: HostId, why: &str) {
        if self.is_leaving(host) {
            return self.host_finished(host);
        }
        let start = self
            .hosts()
            .starting
            .iter()
            .find(|(_, s)| s.plan.id == host)
            .map(|(start, _)| *start);
        if let Some(start) = start {
            self.out.push_back(Output::AbandonStart { start });
            return self.start_over(
                start,
                PvmError::CantStart,
                format!("its daemon was lost: {why}"),
            );
        }
        self.drop_joining(host, why);
        if let Some(change) = &mut self.hosts().change {
            if change.committed {
                change.waiting.remove(&host);
            } else {
                // The host cannot acknowledge the change any more, so the change begins again
                // without it.
                let change = self.hosts().change.take().expect("just seen");
                let hosts = self.hosts();
                hosts.wanted_add.splice(..0, change.add);
                hosts.wanted_remove.splice(..0, change.remove);
                self.drop_joining(host, why);
            }
        }
        if self.table.get(host).is_some() {
            self.want_out(host, why.to_string(), false);
        }
        self.change_step();
        self.try_change();
    }

    /// Drops a lost host that was started but is in no table yet.
    fn drop_joining(&mut self, host: HostId, why: &str) {
        let hosts = self.hosts();
        let waiting = hosts.wanted_add.extract_if(.., |j| j.entry.id == host);
        let ready = hosts
            .adds
            .values_mut()
            .flat_map(|a| a.ready.extract_if(.., |j| j.entry.id == host));
        let dropped: Vec<Joining> = waiting.chain(ready).collect();
        for Joining { job, slot, .. } in dropped {
            self.out.push_back(Output::Forget { host });
            self.slot_failed(
                job,
                slot,
                PvmError::CantStart,
                format!("its daemon was lost: {why}"),
            );
            self.add_step(job);
        }
    }

    /// Abandons all starts in progress, because the virtual machine ends.
    pub(super) fn abandon_starts(&mut self) {
        let starts: Vec<StartId> = self.hosts().starting.keys().copied().collect();
        for start in starts {
            self.out.push_back(Output::AbandonStart { start });
        }
    }
}
