//! The summary of the virtual machine that every host keeps on its disk, for the case that the
//! master is lost.
//!
//! The master learns all facts from the event log. After a change it sends a new summary to all
//! hosts, at most once in [`SUMMARY_INTERVAL`]. A master that is killed can report nothing, so each
//! host keeps the newest summary at all times.

use super::io::Output;
use super::{Machine, Timer};
use sempa_proto::event::{EventKind, LOST_TASKS_NAMED_MAX, LostTasks};
use sempa_proto::host::HostMsg;
use sempa_proto::table::{HostEntry, HostTable};
use sempa_proto::text;
use sempa_proto::vm_summary::{
    SUMMARY_ADDRESSES_MAX, SUMMARY_CHECKPOINTS_MAX, SUMMARY_HOSTS_MAX, SUMMARY_NAME_BYTES_MAX,
    SUMMARY_TASKS_MAX, SummaryCheckpoint, SummaryHost, SummaryTask, VmSummary,
};
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeMap;

/// Shortest time between two summaries. A summary is a message to each host and one file on each
/// host's disk, so tasks that come and go must not cause one each.
const SUMMARY_INTERVAL: Micros = Micros::from_secs(2);
/// Time between the first change and its summary, so that one summary contains all tasks of a
/// spawn.
const SUMMARY_DELAY: Micros = Micros::from_millis(100);
/// Largest number of tasks that the master knows for summaries and for the event of a lost host.
/// Further tasks are only counted.
const KNOWN_TASKS_MAX: usize = 1 << 16;
/// Largest number of jobs whose newest checkpoint is known. The oldest one is forgotten first.
const KNOWN_CHECKPOINTS_MAX: usize = 1024;

#[derive(Clone, Debug)]
struct KnownTask {
    parent: Tid,
    program: String,
    host: HostId,
}

#[derive(Clone, Debug)]
struct KnownCheckpoint {
    name: String,
    program: String,
    made_at: Option<Micros>,
    copy_hosts: Vec<String>,
}

/// The tasks and checkpoints that the master knows from events.
#[derive(Debug, Default)]
pub(super) struct KnownState {
    tasks: BTreeMap<Tid, KnownTask>,
    /// Number of running tasks on each host that are not in `tasks`. Their ends cannot be told from
    /// those of tasks from a command line, so the number is dropped when the host leaves.
    unknown_tasks: BTreeMap<HostId, u32>,
    /// The newest checkpoint of each job, by the job's first task.
    checkpoints: BTreeMap<Tid, KnownCheckpoint>,
    has_changed: bool,
    is_timer_set: bool,
    last_summary_at: Option<Micros>,
}

impl KnownState {
    /// Updates the state after an event of `host` at time of day `at`. `host_name` returns the name
    /// of a host.
    fn update_after_event(
        &mut self,
        host: HostId,
        at: Micros,
        kind: &EventKind,
        host_name: impl Fn(HostId) -> String,
    ) {
        match kind {
            // A task without a parent is a program from a command line, mostly a console, or a
            // server of the virtual machine.
            EventKind::TaskStarted {
                tid, parent, name, ..
            } if *parent != Tid::NONE => self.add_task(*tid, *parent, name, host),
            EventKind::TaskEnded { tid, .. } => {
                self.has_changed |= self.tasks.remove(tid).is_some();
            }
            EventKind::Migrated { tid, to, .. } => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    (task.host, self.has_changed) = (*to, true);
                }
            }
            EventKind::HostAdded { .. } => self.has_changed = true,
            EventKind::HostGone { host, .. } => {
                self.tasks.retain(|_, task| task.host != *host);
                self.unknown_tasks.remove(host);
                self.has_changed = true;
            }
            EventKind::Checkpointed {
                checkpoint, job, ..
            } => self.set_newest_checkpoint(*job, checkpoint, Some(at)),
            EventKind::Restarted {
                checkpoint, job, ..
            } => {
                let is_known = self
                    .checkpoints
                    .get(job)
                    .is_some_and(|known| known.name == *checkpoint);
                if !is_known {
                    self.set_newest_checkpoint(*job, checkpoint, None);
                }
            }
            EventKind::CheckpointCopied {
                checkpoint,
                job,
                hosts,
                ..
            } => {
                if let Some(known) = self.checkpoints.get_mut(job)
                    && known.name == *checkpoint
                {
                    known.copy_hosts = hosts.iter().map(|host| host_name(*host)).collect();
                    self.has_changed = true;
                }
            }
            EventKind::CheckpointsRemoved { checkpoints, .. } => {
                let known_count = self.checkpoints.len();
                self.checkpoints
                    .retain(|_, known| !checkpoints.contains(&known.name));
                self.has_changed |= self.checkpoints.len() != known_count;
            }
            EventKind::CheckpointDamaged {
                checkpoint,
                job,
                replacement,
                ..
            } => self.replace_damaged_checkpoint(*job, checkpoint, replacement.as_deref()),
            EventKind::JobTakenOver { job, .. } => self.forget_checkpoint(*job),
            _ => {}
        }
    }

    fn add_task(&mut self, tid: Tid, parent: Tid, program: &str, host: HostId) {
        self.has_changed = true;
        if self.tasks.len() >= KNOWN_TASKS_MAX && !self.tasks.contains_key(&tid) {
            *self.unknown_tasks.entry(host).or_default() += 1;
            return;
        }
        let task = KnownTask {
            parent,
            program: text::truncate(program, SUMMARY_NAME_BYTES_MAX).to_string(),
            host,
        };
        self.tasks.insert(tid, task);
    }

    fn set_newest_checkpoint(&mut self, job: Tid, name: &str, made_at: Option<Micros>) {
        self.has_changed = true;
        let known_program = self
            .checkpoints
            .get(&job)
            .map(|known| known.program.clone());
        let program = self
            .tasks
            .get(&job)
            .map(|task| task.program.clone())
            .or(known_program);
        let known = KnownCheckpoint {
            name: name.to_string(),
            program: program.unwrap_or_default(),
            made_at,
            copy_hosts: Vec::new(),
        };
        self.checkpoints.insert(job, known);
        while self.checkpoints.len() > KNOWN_CHECKPOINTS_MAX {
            let oldest_job = self
                .checkpoints
                .iter()
                .min_by_key(|(_, known)| known.made_at)
                .map(|(job, _)| *job);
            oldest_job.map(|job| self.checkpoints.remove(&job));
        }
    }

    /// Replaces a checkpoint that is damaged by the one to which the job rolls back instead.
    fn replace_damaged_checkpoint(&mut self, job: Tid, damaged: &str, replacement: Option<&str>) {
        let is_newest = self
            .checkpoints
            .get(&job)
            .is_some_and(|known| known.name == damaged);
        match replacement {
            _ if !is_newest => {}
            Some(name) => self.set_newest_checkpoint(job, name, None),
            None => self.forget_checkpoint(job),
        }
    }

    /// Forgets the checkpoint of a job that does not need it any more.
    fn forget_checkpoint(&mut self, job: Tid) {
        self.has_changed |= self.checkpoints.remove(&job).is_some();
    }

    /// Returns the first known task among a task and its ancestors.
    fn job_of(&self, tid: Tid) -> Tid {
        let mut job = tid;
        // A tid is never its own ancestor; the bound guards against damaged records.
        for _ in 0..self.tasks.len() {
            match self.tasks.get(&job) {
                Some(task) if self.tasks.contains_key(&task.parent) => job = task.parent,
                _ => break,
            }
        }
        job
    }

    /// Returns the tasks that end with a host.
    fn tasks_on(&self, host: HostId) -> LostTasks {
        let mut tasks = self.tasks.iter().filter(|(_, task)| task.host == host);
        let named: Vec<(Tid, String)> = tasks
            .by_ref()
            .take(LOST_TASKS_NAMED_MAX)
            .map(|(tid, task)| (*tid, task.program.clone()))
            .collect();
        let unnamed_count = u32::try_from(tasks.count()).unwrap_or(u32::MAX);
        let unknown_count = self.unknown_tasks.get(&host).copied().unwrap_or_default();
        LostTasks {
            named,
            others: unnamed_count.saturating_add(unknown_count),
        }
    }

    /// Returns the summary of this state.
    fn summary(
        &self,
        (created_at, made_at): (Micros, Micros),
        table: &HostTable,
        store: &str,
    ) -> VmSummary {
        let count = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        let host_name = |id: HostId| {
            table
                .get(id)
                .map_or_else(|| id.to_string(), |host| host.name.clone())
        };
        let summary_host = |host: &HostEntry| SummaryHost {
            id: host.id,
            name: host.name.clone(),
            addresses: host
                .addresses
                .iter()
                .take(SUMMARY_ADDRESSES_MAX)
                .copied()
                .collect(),
        };
        let summary_task = |(tid, task): (&Tid, &KnownTask)| SummaryTask {
            tid: *tid,
            job: self.job_of(*tid),
            program: task.program.clone(),
            host: host_name(task.host),
        };
        let mut checkpoints: Vec<(&Tid, &KnownCheckpoint)> = self.checkpoints.iter().collect();
        checkpoints.sort_by_key(|(_, known)| std::cmp::Reverse(known.made_at));
        let summary_checkpoint = |(job, known): &(&Tid, &KnownCheckpoint)| SummaryCheckpoint {
            job: **job,
            program: known.program.clone(),
            name: known.name.clone(),
            made_at: known.made_at,
            copy_hosts: known.copy_hosts.clone(),
        };
        let unknown_count: u32 = self.unknown_tasks.values().sum();
        VmSummary {
            created_at,
            made_at,
            hosts: table
                .hosts
                .iter()
                .take(SUMMARY_HOSTS_MAX)
                .map(summary_host)
                .collect(),
            host_count: count(table.hosts.len()),
            tasks: self
                .tasks
                .iter()
                .take(SUMMARY_TASKS_MAX)
                .map(summary_task)
                .collect(),
            task_count: count(self.tasks.len()).saturating_add(unknown_count),
            checkpoints: checkpoints
                .iter()
                .take(SUMMARY_CHECKPOINTS_MAX)
                .map(summary_checkpoint)
                .collect(),
            checkpoint_count: count(checkpoints.len()),
            store: store.to_string(),
        }
    }
}

impl Machine {
    /// Master: updates what is known after an event, and schedules the next summary.
    pub(super) fn update_known_state(&mut self, host: HostId, at: Micros, kind: &EventKind) {
        let (now, is_ending) = (self.now, self.shutdown.is_some());
        let table = &self.table;
        let Some(master) = &mut self.master else {
            return;
        };
        let known_state = &mut master.known_state;
        known_state.update_after_event(host, at, kind, |id| {
            table
                .get(id)
                .map_or_else(|| id.to_string(), |entry| entry.name.clone())
        });
        // After a restart the hosts learn that the notes of an earlier virtual machine are settled.
        // The job's next checkpoint may replace the name of this one soon.
        let is_urgent = matches!(kind, EventKind::Restarted { .. });
        if !known_state.has_changed || is_ending || (known_state.is_timer_set && !is_urgent) {
            return;
        }
        known_state.is_timer_set = true;
        let earliest_time = known_state
            .last_summary_at
            .filter(|_| !is_urgent)
            .map_or(now, |sent_at| sent_at + SUMMARY_INTERVAL);
        let delay = earliest_time.since(now).max(SUMMARY_DELAY);
        self.set_timer(delay, Timer::SummaryDue);
    }

    /// Master: sends the summary to all hosts, and has it kept on this host.
    pub(super) fn send_summary(&mut self) {
        let times = self.unix_time;
        let Some(master) = &mut self.master else {
            return;
        };
        let known_state = &mut master.known_state;
        known_state.is_timer_set = false;
        if !std::mem::take(&mut known_state.has_changed) || self.shutdown.is_some() {
            return;
        }
        known_state.last_summary_at = Some(self.now);
        let created_at = master.checkpoints.created_at();
        let summary = Box::new(master.known_state.summary(
            (created_at, times),
            &self.table,
            &self.config.store_dir,
        ));
        for host in self.other_hosts() {
            self.send_to_host(host, HostMsg::Summary(summary.clone()));
        }
        self.outputs.push_back(Output::KeepSummary { summary });
    }

    /// Master: returns the tasks that end with a host.
    pub(super) fn tasks_lost_with(&self, host: HostId) -> LostTasks {
        self.master
            .as_ref()
            .map(|master| master.known_state.tasks_on(host))
            .unwrap_or_default()
    }

    /// Master: a job has ended for good, so nobody needs to restart it.
    pub(super) fn forget_known_checkpoint(&mut self, job: Tid) {
        if let Some(master) = &mut self.master {
            master.known_state.forget_checkpoint(job);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::migration::Usage;

    fn host(index: u16) -> HostId {
        HostId::new(index).expect("an index")
    }

    fn tid(index: u16, local: u32) -> Tid {
        Tid::for_task(host(index), local).expect("in range")
    }

    fn started(tid: Tid, parent: Tid, name: &str) -> EventKind {
        EventKind::TaskStarted {
            tid,
            parent,
            name: name.into(),
            user: 0,
        }
    }

    fn ended(tid: Tid) -> EventKind {
        EventKind::TaskEnded {
            tid,
            status: 0,
            used: Usage::default(),
        }
    }

    fn checkpointed(name: &str, job: Tid) -> EventKind {
        EventKind::Checkpointed {
            checkpoint: name.into(),
            job,
            tasks: 1,
            bytes: 1,
            frozen: Micros(0),
            vacated: false,
        }
    }

    fn gone(index: u16) -> EventKind {
        EventKind::HostGone {
            host: host(index),
            name: format!("h{index}"),
            why: "lost".into(),
            lost_tasks: LostTasks::default(),
        }
    }

    fn table() -> HostTable {
        let entry = |index| HostEntry {
            id: host(index),
            name: format!("h{index}"),
            arch: "LINUX64".into(),
            speed: 1000,
            dsig: 0,
            addresses: Vec::new(),
        };
        HostTable {
            hosts: vec![entry(1), entry(2)],
            ..HostTable::default()
        }
    }

    /// Applies events, each with the number of its host.
    fn state_after(events: &[(u16, EventKind)]) -> KnownState {
        let mut state = KnownState::default();
        for (at, (index, kind)) in (1..).zip(events) {
            let name = |id: HostId| format!("h{}", id.index());
            state.update_after_event(host(*index), Micros(at), kind, name);
        }
        state
    }

    fn summary_of(state: &KnownState) -> VmSummary {
        state.summary((Micros(7), Micros(9)), &table(), "/store")
    }

    /// A summary contains the tasks that run, with their jobs and hosts, and neither consoles nor
    /// servers of the virtual machine.
    #[test]
    fn summary_names_running_tasks() {
        let (console, first, second) = (tid(1, 1), tid(1, 2), tid(2, 1));
        let state = state_after(&[
            (1, started(console, Tid::NONE, "")),
            (1, started(tid(1, 9), Tid::NONE, "pvm-rm")),
            (1, started(first, console, "main")),
            (2, started(second, first, "worker")),
            (2, started(tid(2, 2), first, "worker")),
            (2, ended(tid(2, 2))),
        ]);
        let summary = summary_of(&state);
        let task = |tid, job, program: &str, host: &str| SummaryTask {
            tid,
            job,
            program: program.into(),
            host: host.into(),
        };
        assert_eq!(
            summary.tasks,
            [
                task(first, first, "main", "h1"),
                task(second, first, "worker", "h2")
            ]
        );
        assert_eq!((summary.task_count, summary.host_count), (2, 2));
        assert_eq!((summary.master_name(), &*summary.store), ("h1", "/store"));
    }

    /// The newest checkpoint of each job is in the summary until the job has ended for good.
    #[test]
    fn summary_names_newest_checkpoints() {
        let (console, first, second) = (tid(1, 1), tid(1, 2), tid(1, 3));
        let mut state = state_after(&[
            (1, started(first, console, "main")),
            (1, checkpointed("a", first)),
            (1, started(second, console, "other")),
            (1, checkpointed("b", second)),
            (1, checkpointed("c", first)),
        ]);
        let names = |state: &KnownState| {
            let summary = summary_of(state);
            summary
                .checkpoints
                .iter()
                .map(|entry| format!("{} {} {}", entry.job, entry.program, entry.name))
                .collect::<Vec<_>>()
        };
        assert_eq!(names(&state), ["t40002 main c", "t40003 other b"]);
        state.forget_checkpoint(first);
        assert_eq!(names(&state), ["t40003 other b"]);
    }

    /// A damaged or removed checkpoint is not offered for a restart.
    #[test]
    fn unusable_checkpoints_are_replaced() {
        let job = tid(1, 2);
        let damaged = |replacement: Option<&str>| EventKind::CheckpointDamaged {
            checkpoint: "a".into(),
            job,
            why: "x".into(),
            rolls_back: true,
            replacement: replacement.map(String::from),
        };
        let newest = |last_event: EventKind| {
            let state = state_after(&[(1, checkpointed("a", job)), (1, last_event)]);
            let names = summary_of(&state).checkpoints.into_iter();
            names.map(|entry| entry.name).collect::<Vec<_>>()
        };
        assert_eq!(newest(damaged(Some("older"))), ["older"]);
        assert_eq!(newest(damaged(None)), [""; 0]);
        let removed = EventKind::CheckpointsRemoved {
            checkpoints: vec!["a".into()],
            why: "x".into(),
        };
        assert_eq!(newest(removed), [""; 0]);
        assert_eq!(newest(ended(job)), ["a"]);
    }

    /// The tasks of a lost host are named once, where they ran last.
    #[test]
    fn tasks_of_lost_host_are_known() {
        let (console, first, second) = (tid(1, 1), tid(1, 2), tid(2, 1));
        let mut state = state_after(&[
            (1, started(first, console, "main")),
            (2, started(second, first, "worker")),
        ]);
        let lost_tasks = state.tasks_on(host(2));
        assert_eq!(lost_tasks.named, [(second, "worker".to_string())]);
        state.update_after_event(host(1), Micros(9), &gone(2), |_| String::new());
        assert_eq!(state.tasks_on(host(2)), LostTasks::default());
        assert_eq!(summary_of(&state).task_count, 1);
    }

    /// Lists have limits, and the counts are those of the whole lists.
    #[test]
    fn long_lists_are_cut_and_counted() {
        let mut state = KnownState::default();
        let count = u32::try_from(LOST_TASKS_NAMED_MAX + 5).expect("small");
        for local in 1..=count {
            let tid = tid(2, local);
            state.add_task(tid, Tid::from_raw(0x40001), &"x".repeat(1000), host(2));
            state.set_newest_checkpoint(tid, "c", Some(Micros(u64::from(local))));
        }
        let summary = summary_of(&state);
        assert_eq!(
            (summary.tasks.len(), summary.task_count),
            (SUMMARY_TASKS_MAX, count)
        );
        assert_eq!(summary.tasks[0].program.len(), SUMMARY_NAME_BYTES_MAX);
        assert_eq!(
            (summary.checkpoints.len(), summary.checkpoint_count),
            (SUMMARY_CHECKPOINTS_MAX, count)
        );
        assert_eq!(
            summary.checkpoints[0].made_at,
            Some(Micros(u64::from(count)))
        );
        assert_eq!(state.tasks_on(host(2)).others, 5);
    }
}
