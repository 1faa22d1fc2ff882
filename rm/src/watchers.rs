//! Runs one load watcher on every host: adopts the one that the daemon has started, otherwise
//! starts one, and restarts it when it ends or does not report. The module does no input or
//! output: the service carries out the output of [`Watchers::poll`].
//!
//! With ten thousand hosts, every report is processed here. Therefore no operation examines all
//! hosts.

use crate::recent_set::RecentSet;
use sempa_proto::{HostId, Micros, PvmError, PvmResult, Tid};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// Timeout for the start of a watcher on a host.
pub const START_TIMEOUT: Micros = Micros::from_secs(10);
/// Delay before the second attempt to start a watcher. Doubles after each failure, up to
/// [`WATCHER_RETRY_MAX`].
pub const WATCHER_RETRY_MIN: Micros = Micros::from_millis(250);
/// Maximum delay between two attempts to start a watcher.
pub const WATCHER_RETRY_MAX: Micros = Micros::from_secs(60);
/// Minimum run time of a watcher after which the counts of failures and short runs are reset.
const LONG_RUN_MIN: Micros = Micros::from_secs(30);
/// Number of consecutive short runs after which a note is added to the event log.
const SHORT_RUNS_MAX: u32 = 3;
/// Time without a report after which a watcher is terminated and replaced. Watchers report every
/// ten seconds.
pub const SILENCE_TIMEOUT: Micros = Micros::from_secs(45);
/// Timeout for the first report of an adopted watcher.
pub const ADOPTION_TIMEOUT: Micros = Micros::from_secs(5);
/// Maximum number of abandoned orders whose wait id is remembered, in order to recognize a late
/// acknowledgement.
const ABANDONED_ORDERS_MAX: usize = 4096;

/// Action that the service must carry out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatcherOutput {
    /// Start a watcher on a host, then call [`Watchers::record_order_sent`].
    Start(HostId),
    /// Request this watcher, which a daemon or an earlier resource manager started, to report to
    /// the current resource manager.
    Adopt(Tid),
    /// Request a notification of this watcher's end.
    Notify(Tid),
    Terminate(Tid),
    /// Add a note to the event log.
    Note(String),
}

#[derive(Debug, PartialEq, Eq)]
enum WatcherState {
    StartPending {
        start_at: Micros,
    },
    Starting {
        wid: Option<i32>,
        deadline: Micros,
    },
    Adopting {
        tid: Tid,
        deadline: Micros,
    },
    Running {
        tid: Tid,
        running_since: Micros,
        last_report_at: Micros,
    },
}

#[derive(Debug)]
struct Watcher {
    state: WatcherState,
    failure_count: u32,
    /// Number of consecutive runs that ended soon after their start.
    short_run_count: u32,
    reported_error: Option<PvmError>,
}

/// The load watchers of all hosts.
#[derive(Debug)]
pub struct Watchers {
    watchers: BTreeMap<HostId, Watcher>,
    /// Times of the next check of each host. A host may have several entries. An entry may be
    /// earlier than the host's deadline, because a report postpones only the deadline.
    checks: BTreeSet<(Micros, HostId)>,
    /// Hosts of the orders that are not acknowledged yet, by wait id.
    hosts_by_order: HashMap<i32, HostId>,
    /// Hosts of the running watchers, by task.
    hosts_by_task: HashMap<Tid, HostId>,
    abandoned_orders: RecentSet<i32>,
    outputs: VecDeque<WatcherOutput>,
}

impl Default for Watchers {
    fn default() -> Self {
        let (no_orders, no_tasks) = (HashMap::new(), HashMap::new());
        let (hosts, check_times) = (BTreeMap::new(), BTreeSet::new());
        Self {
            watchers: hosts,
            checks: check_times,
            hosts_by_order: no_orders,
            hosts_by_task: no_tasks,
            abandoned_orders: RecentSet::new(ABANDONED_ORDERS_MAX),
            outputs: VecDeque::new(),
        }
    }
}

impl Watcher {
    /// Counts a failed attempt. Returns the state in which the watcher waits for the next attempt.
    fn count_failure(&mut self, now: Micros) -> WatcherState {
        let delay =
            Micros((WATCHER_RETRY_MIN.0 << self.failure_count.min(12)).min(WATCHER_RETRY_MAX.0));
        self.failure_count += 1;
        WatcherState::StartPending {
            start_at: now + delay,
        }
    }

    fn deadline_or_start(&self) -> Micros {
        match self.state {
            WatcherState::StartPending {
                start_at: start_time,
            } => start_time,
            WatcherState::Starting {
                deadline: end_time, ..
            }
            | WatcherState::Adopting {
                deadline: end_time, ..
            } => end_time,
            WatcherState::Running {
                last_report_at: report_time,
                ..
            } => report_time + SILENCE_TIMEOUT,
        }
    }

    fn task(&self) -> Option<Tid> {
        match self.state {
            WatcherState::Running { tid, .. } | WatcherState::Adopting { tid, .. } => Some(tid),
            WatcherState::StartPending { .. } | WatcherState::Starting { .. } => None,
        }
    }

    fn wait_id(&self) -> Option<i32> {
        match self.state {
            WatcherState::Starting { wid, .. } => wid,
            _ => None,
        }
    }
}

/// Returns the note about a host on which the watcher repeatedly ends soon after its start. The
/// note does not contain the watcher's output, because the output is in the master's log.
fn short_runs_note(host: HostId) -> String {
    format!(
        "load watcher of {host} ended soon after its start {SHORT_RUNS_MAX} times in a row: its owner is not protected; \
         its output is in the master's log; it is started again"
    )
}

impl Watchers {
    /// Adds a host that has joined the virtual machine. Its watcher is due immediately.
    pub fn add_host(&mut self, now: Micros, host: HostId) {
        let watcher = Watcher {
            state: WatcherState::StartPending { start_at: now },
            failure_count: 0,
            short_run_count: 0,
            reported_error: None,
        };
        self.watchers.entry(host).or_insert(watcher);
        self.checks.insert((now, host));
    }

    /// Changes the state of a host's watcher. Updates the indices by order and by task, and
    /// schedules the next check of the host.
    fn set_state(&mut self, host: HostId, state: WatcherState) {
        let Some(watcher) = self.watchers.get_mut(&host) else {
            return;
        };
        watcher
            .wait_id()
            .map(|wid| self.hosts_by_order.remove(&wid));
        watcher.task().map(|tid| self.hosts_by_task.remove(&tid));
        watcher.state = state;
        self.hosts_by_order
            .extend(watcher.wait_id().map(|wid| (wid, host)));
        self.hosts_by_task
            .extend(watcher.task().map(|tid| (tid, host)));
        self.checks.insert((watcher.deadline_or_start(), host));
    }

    /// Schedules the next attempt to start the watcher of a host after a failure.
    fn schedule_retry(&mut self, now: Micros, host: HostId) {
        if let Some(state) = self
            .watchers
            .get_mut(&host)
            .map(|watcher| watcher.count_failure(now))
        {
            self.set_state(host, state);
        }
    }

    /// Adopts a running watcher of the host's daemon or of an earlier resource manager. Has no
    /// effect if this resource manager has already ordered the start of a watcher on the host.
    pub fn adopt_watcher(&mut self, now: Micros, host: HostId, tid: Tid) {
        if self
            .watchers
            .get(&host)
            .is_some_and(|watcher| matches!(watcher.state, WatcherState::StartPending { .. }))
        {
            self.set_state(
                host,
                WatcherState::Adopting {
                    tid,
                    deadline: now + ADOPTION_TIMEOUT,
                },
            );
            self.outputs
                .extend([WatcherOutput::Adopt(tid), WatcherOutput::Notify(tid)]);
        }
    }

    /// Removes a host that is no longer in the virtual machine, and its watcher.
    pub fn remove_host(&mut self, host: HostId) {
        let Some(watcher) = self.watchers.remove(&host) else {
            return;
        };
        watcher.task().map(|tid| self.hosts_by_task.remove(&tid));
        if let Some(wid) = watcher.wait_id() {
            self.hosts_by_order.remove(&wid);
            self.abandoned_orders.insert(wid);
        }
    }

    /// Records the wait id of an order that was sent. `None`: the order could not be sent, and the
    /// start is retried later.
    pub fn record_order_sent(&mut self, now: Micros, host: HostId, wid: Option<i32>) {
        match wid {
            Some(wid) => self.set_state(
                host,
                WatcherState::Starting {
                    wid: Some(wid),
                    deadline: now + START_TIMEOUT,
                },
            ),
            None => self.schedule_retry(now, host),
        }
    }

    /// Handles a host's acknowledgement of an order. Returns `None` if no order of a watcher has
    /// this wait id. Otherwise the inner value is the host with its new watcher, or `None` if no
    /// watcher is used.
    pub fn handle_acknowledgement(
        &mut self,
        now: Micros,
        wid: i32,
        start_results: &PvmResult<Vec<PvmResult<Tid>>>,
    ) -> Option<Option<(HostId, Tid)>> {
        let result = start_results.as_ref().map_or_else(
            |e| Err(*e),
            |s| s.first().copied().unwrap_or(Err(PvmError::DSysErr)),
        );
        let Some(host) = self.hosts_by_order.get(&wid).copied() else {
            if !self.abandoned_orders.contains(wid) {
                return None;
            }
            // The order was abandoned, or another watcher of the host has reported and is used. The
            // started watcher is terminated, unless it is the watcher that is used.
            if let Ok(tid) = result.map_err(|_| ())
                && self.watched_host(tid).is_none()
            {
                self.outputs.push_back(WatcherOutput::Terminate(tid));
            }
            return Some(None);
        };
        match result {
            Ok(tid) => {
                self.set_state(
                    host,
                    WatcherState::Running {
                        tid,
                        running_since: now,
                        last_report_at: now,
                    },
                );
                self.watchers
                    .get_mut(&host)
                    .into_iter()
                    .for_each(|watcher| watcher.reported_error = None);
                self.outputs.push_back(WatcherOutput::Notify(tid));
                Some(Some((host, tid)))
            }
            Err(error) => {
                self.schedule_retry(now, host);
                if let Some(watcher) = self
                    .watchers
                    .get_mut(&host)
                    .filter(|watcher| watcher.reported_error != Some(error))
                {
                    watcher.reported_error = Some(error);
                    let text = format!(
                        "no load watcher on {host}: {error}; its load and its owner are unknown; the start is retried"
                    );
                    self.outputs.push_back(WatcherOutput::Note(text));
                }
                Some(None)
            }
        }
    }

    /// Handles a report that the task `sender` sends as the watcher of the host `watched_host_id`.
    /// Returns true if the report is valid.
    pub fn handle_report(&mut self, now: Micros, sender: Tid, watched_host_id: HostId) -> bool {
        let Some(watcher) = self.watchers.get_mut(&watched_host_id) else {
            return false;
        };
        match &mut watcher.state {
            WatcherState::Running {
                tid,
                last_report_at: report_time,
                ..
            } if *tid == sender => *report_time = now,
            WatcherState::Adopting { tid, .. } if *tid == sender => {
                self.set_state(
                    watched_host_id,
                    WatcherState::Running {
                        tid: sender,
                        running_since: now,
                        last_report_at: now,
                    },
                );
            }
            // The first report may arrive before the host's acknowledgement. It may also come from
            // a watcher that the host has started itself.
            WatcherState::Starting { .. } | WatcherState::StartPending { .. }
                if sender.birth_host() == Some(watched_host_id) =>
            {
                if let WatcherState::Starting { wid: Some(wid), .. } = watcher.state {
                    self.abandoned_orders.insert(wid);
                }
                self.set_state(
                    watched_host_id,
                    WatcherState::Running {
                        tid: sender,
                        running_since: now,
                        last_report_at: now,
                    },
                );
                self.outputs.push_back(WatcherOutput::Notify(sender));
            }
            // A second watcher runs on the host.
            WatcherState::Running { .. } if sender.birth_host() == Some(watched_host_id) => {
                self.outputs.push_back(WatcherOutput::Terminate(sender));
                return false;
            }
            _ => return false,
        }
        true
    }

    /// Returns the host that this task watches; `None` if the task is not a watcher.
    pub fn watched_host(&self, task: Tid) -> Option<HostId> {
        self.hosts_by_task.get(&task).copied()
    }

    /// Handles the end of a task. Returns true if the task was a watcher.
    pub fn handle_task_end(&mut self, now: Micros, task: Tid) -> bool {
        let Some(host) = self.watched_host(task) else {
            return false;
        };
        if let Some(watcher) = self.watchers.get_mut(&host)
            && let WatcherState::Running {
                running_since: start_time,
                ..
            } = watcher.state
        {
            if now.since(start_time) >= LONG_RUN_MIN {
                (watcher.failure_count, watcher.short_run_count) = (0, 0);
            } else {
                watcher.short_run_count = watcher.short_run_count.saturating_add(1);
                if watcher.short_run_count == SHORT_RUNS_MAX {
                    self.outputs
                        .push_back(WatcherOutput::Note(short_runs_note(host)));
                }
            }
        }
        self.schedule_retry(now, host);
        true
    }

    /// Handles the watchers whose deadline has passed: starts, abandons or replaces them.
    pub fn handle_deadlines(&mut self, now: Micros) {
        while let Some((check_time, host)) = self
            .checks
            .first()
            .copied()
            .filter(|(check_time, _)| *check_time <= now)
        {
            self.checks.remove(&(check_time, host));
            let Some(next_check) = self.watchers.get(&host).map(Watcher::deadline_or_start) else {
                continue;
            };
            if next_check > now {
                // The watcher has reported since this entry was added, so its deadline is later.
                self.checks.insert((next_check, host));
            } else {
                self.handle_deadline(now, host);
            }
        }
    }

    /// Handles the expired deadline of a host's watcher.
    fn handle_deadline(&mut self, now: Micros, host: HostId) {
        let Some(watcher) = self.watchers.get(&host) else {
            return;
        };
        match watcher.state {
            WatcherState::StartPending { .. } => {
                self.set_state(
                    host,
                    WatcherState::Starting {
                        wid: None,
                        deadline: now + START_TIMEOUT,
                    },
                );
                self.outputs.push_back(WatcherOutput::Start(host));
            }
            WatcherState::Starting { wid, .. } => {
                if let Some(wid) = wid {
                    self.abandoned_orders.insert(wid);
                }
                self.schedule_retry(now, host);
            }
            WatcherState::Adopting { tid, .. } => {
                self.outputs.push_back(WatcherOutput::Terminate(tid));
                let text = format!(
                    "load watcher {tid} of {host}, which ran before this resource manager, does not report; it is \
                     replaced"
                );
                self.outputs.push_back(WatcherOutput::Note(text));
                self.schedule_retry(now, host);
            }
            WatcherState::Running { tid, .. } => {
                self.outputs.push_back(WatcherOutput::Terminate(tid));
                let seconds = SILENCE_TIMEOUT.0 / 1_000_000;
                let text = format!(
                    "load watcher {tid} of {host} was silent for {seconds} s; it is replaced"
                );
                self.outputs.push_back(WatcherOutput::Note(text));
                self.schedule_retry(now, host);
            }
        }
    }

    /// Returns the time at which [`Watchers::handle_deadlines`] must be called. The time may be
    /// earlier than necessary.
    pub fn next_deadline(&self) -> Option<Micros> {
        self.checks.first().map(|(check_time, _)| *check_time)
    }

    /// Removes the next action from the queue of outputs and returns it; `None` if the queue is
    /// empty.
    pub fn poll(&mut self) -> Option<WatcherOutput> {
        self.outputs.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(watchers: &mut Watchers) -> Vec<String> {
        let note = |output| {
            if let WatcherOutput::Note(text) = output {
                Some(text)
            } else {
                None
            }
        };
        std::iter::from_fn(|| watchers.poll())
            .filter_map(note)
            .collect()
    }

    /// Starts the next watcher, with order and task number `number`, and ends the watcher after
    /// `run_time`. Returns the notes about the watcher.
    fn run_and_end(watchers: &mut Watchers, number: u32, run_time: Micros) -> Vec<String> {
        let host = HostId::MASTER;
        let (wid, tid) = (
            number.cast_signed(),
            Tid::for_task(host, number).expect("a task"),
        );
        let now = watchers.next_deadline().expect("it is wanted");
        watchers.handle_deadlines(now);
        watchers.record_order_sent(now, host, Some(wid));
        assert_eq!(
            watchers.handle_acknowledgement(now, wid, &Ok(vec![Ok(tid)])),
            Some(Some((host, tid)))
        );
        assert!(watchers.handle_task_end(now + run_time, tid));
        notes(watchers)
    }

    /// If a watcher repeatedly ends soon after its start, one note is recorded. A second note is
    /// possible only after a long run.
    #[test]
    fn repeated_short_runs_are_reported_once() {
        let mut watchers = Watchers::default();
        watchers.add_host(Micros(0), HostId::MASTER);
        let mut number = 0;
        let mut notes_of_run = |run_time: Micros| {
            number += 1;
            run_and_end(&mut watchers, number, run_time)
        };
        let (short_run, long_run) = (Micros::from_millis(5), LONG_RUN_MIN);
        for _ in 1..SHORT_RUNS_MAX {
            assert_eq!(notes_of_run(short_run), Vec::<String>::new());
        }
        let first_notes = notes_of_run(short_run);
        let has_expected_start = |text: &String| {
            text.starts_with("load watcher of host 1 ended soon after its start 3 times in a row")
        };
        assert!(
            first_notes.len() == 1 && first_notes.iter().all(has_expected_start),
            "{first_notes:?}"
        );
        for _ in 0..2 * SHORT_RUNS_MAX {
            assert_eq!(
                notes_of_run(short_run),
                Vec::<String>::new(),
                "once is enough"
            );
        }
        assert_eq!(notes_of_run(long_run), Vec::<String>::new());
        for _ in 1..SHORT_RUNS_MAX {
            assert_eq!(notes_of_run(short_run), Vec::<String>::new());
        }
        assert_eq!(notes_of_run(short_run), first_notes);
    }
}
