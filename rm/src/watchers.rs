//! Keeps one load watcher running on every host: starts it, and restarts it when it ends or is
//! silent. Pure; the service carries out the output of [`Watchers::poll`].
//!
//! With ten thousand hosts, every report is processed here. So no operation examines all hosts.

use crate::recent::RecentSet;
use sempa_proto::{HostId, Micros, PvmError, PvmResult, Tid};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// Timeout for the start of a watcher on a host.
pub const START_TIMEOUT: Micros = Micros::from_secs(10);
/// Delay before the second attempt. Doubles after each failure, up to [`WATCHER_RETRY_MAX`].
pub const WATCHER_RETRY_MIN: Micros = Micros::from_millis(250);
/// Maximum delay between attempts.
pub const WATCHER_RETRY_MAX: Micros = Micros::from_secs(60);
/// If a watcher ran for at least this time, the count of failures is reset.
const STEADY_RUN_MIN: Micros = Micros::from_secs(30);
/// Number of consecutive short runs after which the event log gets a note.
const SHORT_RUNS_MAX: u32 = 3;
/// Time without a report after which a watcher is terminated and replaced. Watchers report every
/// ten seconds.
pub const SILENCE_TIMEOUT: Micros = Micros::from_secs(45);
/// Timeout for the first report of a watcher that an earlier resource manager started.
pub const ADOPT_TIMEOUT: Micros = Micros::from_secs(5);
/// Maximum number of abandoned orders whose wait id is remembered, to recognize a late
/// acknowledgement.
const LATE_ORDERS_MAX: usize = 4096;

/// Action that the service must carry out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatcherOutput {
    /// Start a watcher on a host, then call [`Watchers::order_sent`].
    Start(HostId),
    /// Ask this watcher, started by an earlier resource manager, to report to this one.
    Adopt(Tid),
    /// Request a notification of this watcher's end.
    Notify(Tid),
    Terminate(Tid),
    /// Add a note to the event log.
    Note(String),
}

#[derive(Debug, PartialEq, Eq)]
enum WatcherState {
    Wanted {
        start_at: Micros,
    },
    Starting {
        wid: Option<i32>,
        deadline: Micros,
    },
    Adopted {
        tid: Tid,
        deadline: Micros,
    },
    Running {
        tid: Tid,
        since: Micros,
        last_report: Micros,
    },
}

#[derive(Debug)]
struct Watcher {
    state: WatcherState,
    failures: u32,
    /// Number of consecutive runs that ended soon after their start.
    short_runs: u32,
    reported_error: Option<PvmError>,
}

/// The watchers of all hosts.
#[derive(Debug)]
pub struct Watchers {
    hosts: BTreeMap<HostId, Watcher>,
    /// Times of the next check of each host. A host may have several entries, and an entry may be
    /// earlier than the deadline: a report postpones only the deadline.
    due: BTreeSet<(Micros, HostId)>,
    /// Hosts of the orders that are not acknowledged yet, by wait id.
    hosts_by_order: HashMap<i32, HostId>,
    /// Hosts of the running watchers, by task.
    hosts_by_task: HashMap<Tid, HostId>,
    late_orders: RecentSet<i32>,
    outputs: VecDeque<WatcherOutput>,
}

impl Default for Watchers {
    fn default() -> Watchers {
        let (starting, tasks) = (HashMap::new(), HashMap::new());
        let (hosts, due) = (BTreeMap::new(), BTreeSet::new());
        Watchers {
            hosts,
            due,
            hosts_by_order: starting,
            hosts_by_task: tasks,
            late_orders: RecentSet::new(LATE_ORDERS_MAX),
            outputs: VecDeque::new(),
        }
    }
}

impl Watcher {
    /// Counts a failed attempt. Returns the state in which the watcher waits for the next one.
    fn after_failure(&mut self, now: Micros) -> WatcherState {
        let pause = Micros((WATCHER_RETRY_MIN.0 << self.failures.min(12)).min(WATCHER_RETRY_MAX.0));
        self.failures += 1;
        WatcherState::Wanted {
            start_at: now + pause,
        }
    }

    fn due_at(&self) -> Micros {
        match self.state {
            WatcherState::Wanted { start_at: at } => at,
            WatcherState::Starting {
                deadline: until, ..
            }
            | WatcherState::Adopted {
                deadline: until, ..
            } => until,
            WatcherState::Running {
                last_report: heard, ..
            } => heard + SILENCE_TIMEOUT,
        }
    }

    fn task(&self) -> Option<Tid> {
        match self.state {
            WatcherState::Running { tid, .. } | WatcherState::Adopted { tid, .. } => Some(tid),
            WatcherState::Wanted { .. } | WatcherState::Starting { .. } => None,
        }
    }

    fn wait_id(&self) -> Option<i32> {
        match self.state {
            WatcherState::Starting { wid, .. } => wid,
            _ => None,
        }
    }
}

/// Returns the note about a host on which the watcher repeatedly ends soon after its start. It does
/// not contain the watcher's output, which the master's log collects.
fn short_runs_note(host: HostId) -> String {
    format!(
        "load watcher of {host} ended soon after its start {SHORT_RUNS_MAX} times in a row: its owner is not protected; \
         its output is in the master's log; it is started again"
    )
}

impl Watchers {
    /// Adds a host that has joined.
    pub fn add(&mut self, now: Micros, host: HostId) {
        let watcher = Watcher {
            state: WatcherState::Wanted { start_at: now },
            failures: 0,
            short_runs: 0,
            reported_error: None,
        };
        self.hosts.entry(host).or_insert(watcher);
        self.due.insert((now, host));
    }

    /// Changes the state of a host's watcher, and updates the indices and the deadline.
    fn set_state(&mut self, host: HostId, state: WatcherState) {
        let Some(watcher) = self.hosts.get_mut(&host) else {
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
        self.due.insert((watcher.due_at(), host));
    }

    /// Schedules the next attempt to start the watcher of a host after a failure.
    fn schedule_retry(&mut self, now: Micros, host: HostId) {
        if let Some(state) = self
            .hosts
            .get_mut(&host)
            .map(|watcher| watcher.after_failure(now))
        {
            self.set_state(host, state);
        }
    }

    /// Adopts a running watcher of an earlier resource manager, unless this one has already ordered
    /// the start of a watcher on the host.
    pub fn adopt(&mut self, now: Micros, host: HostId, tid: Tid) {
        if self
            .hosts
            .get(&host)
            .is_some_and(|watcher| matches!(watcher.state, WatcherState::Wanted { .. }))
        {
            self.set_state(
                host,
                WatcherState::Adopted {
                    tid,
                    deadline: now + ADOPT_TIMEOUT,
                },
            );
            self.outputs
                .extend([WatcherOutput::Adopt(tid), WatcherOutput::Notify(tid)]);
        }
    }

    /// Removes a host that has left, with its watcher.
    pub fn remove(&mut self, host: HostId) {
        let Some(watcher) = self.hosts.remove(&host) else {
            return;
        };
        watcher.task().map(|tid| self.hosts_by_task.remove(&tid));
        if let Some(wid) = watcher.wait_id() {
            self.hosts_by_order.remove(&wid);
            self.late_orders.insert(wid);
        }
    }

    /// Records the wait id of an order that was sent; `None` if it could not be sent.
    pub fn order_sent(&mut self, now: Micros, host: HostId, wid: Option<i32>) {
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

    /// The order was abandoned, or the watcher has already reported and is known. An unknown
    /// watcher is terminated.
    pub fn order_acknowledged(
        &mut self,
        now: Micros,
        wid: i32,
        started: &PvmResult<Vec<PvmResult<Tid>>>,
    ) -> Option<Option<(HostId, Tid)>> {
        let result = started.as_ref().map_or_else(
            |e| Err(*e),
            |s| s.first().copied().unwrap_or(Err(PvmError::DSysErr)),
        );
        let Some(host) = self.hosts_by_order.get(&wid).copied() else {
            if !self.late_orders.contains(wid) {
                return None;
            }
            // The order was abandoned, or another watcher of the host has reported since and is
            // used. The started watcher is terminated.
            if let Ok(tid) = result.map_err(|_| ())
                && self.host_of(tid).is_none()
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
                        since: now,
                        last_report: now,
                    },
                );
                self.hosts
                    .get_mut(&host)
                    .into_iter()
                    .for_each(|watcher| watcher.reported_error = None);
                self.outputs.push_back(WatcherOutput::Notify(tid));
                Some(Some((host, tid)))
            }
            Err(error) => {
                self.schedule_retry(now, host);
                if let Some(watcher) = self
                    .hosts
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

    /// Handles a report that task `src` sends as the watcher of host `from`. Returns true
    /// if the report is valid.
    pub fn report_received(&mut self, now: Micros, src: Tid, from: HostId) -> bool {
        let Some(watcher) = self.hosts.get_mut(&from) else {
            return false;
        };
        match &mut watcher.state {
            WatcherState::Running {
                tid,
                last_report: heard,
                ..
            } if *tid == src => *heard = now,
            WatcherState::Adopted { tid, .. } if *tid == src => {
                self.set_state(
                    from,
                    WatcherState::Running {
                        tid: src,
                        since: now,
                        last_report: now,
                    },
                );
            }
            // The first report may arrive before the host's acknowledgement. It may also come from
            // a watcher that the host has started itself.
            WatcherState::Starting { .. } | WatcherState::Wanted { .. }
                if src.birth_host() == Some(from) =>
            {
                if let WatcherState::Starting { wid: Some(wid), .. } = watcher.state {
                    self.late_orders.insert(wid);
                }
                self.set_state(
                    from,
                    WatcherState::Running {
                        tid: src,
                        since: now,
                        last_report: now,
                    },
                );
                self.outputs.push_back(WatcherOutput::Notify(src));
            }
            // A second watcher runs on the host.
            WatcherState::Running { .. } if src.birth_host() == Some(from) => {
                self.outputs.push_back(WatcherOutput::Terminate(src));
                return false;
            }
            _ => return false,
        }
        true
    }

    /// Returns the host that this task watches.
    pub fn host_of(&self, task: Tid) -> Option<HostId> {
        self.hosts_by_task.get(&task).copied()
    }

    /// Handles the end of a task. Returns true if the task was a watcher.
    pub fn task_ended(&mut self, now: Micros, task: Tid) -> bool {
        let Some(host) = self.host_of(task) else {
            return false;
        };
        if let Some(watcher) = self.hosts.get_mut(&host)
            && let WatcherState::Running { since, .. } = watcher.state
        {
            if now.since(since) >= STEADY_RUN_MIN {
                (watcher.failures, watcher.short_runs) = (0, 0);
            } else {
                watcher.short_runs = watcher.short_runs.saturating_add(1);
                if watcher.short_runs == SHORT_RUNS_MAX {
                    self.outputs
                        .push_back(WatcherOutput::Note(short_runs_note(host)));
                }
            }
        }
        self.schedule_retry(now, host);
        true
    }

    /// Starts watchers that are due, and abandons those whose timeout has expired.
    pub fn tick(&mut self, now: Micros) {
        while let Some((at, host)) = self.due.first().copied().filter(|(at, _)| *at <= now) {
            self.due.remove(&(at, host));
            let Some(due) = self.hosts.get(&host).map(Watcher::due_at) else {
                continue;
            };
            if due > now {
                // The watcher has reported since this entry was made, so its deadline is later.
                self.due.insert((due, host));
            } else {
                self.handle_deadline(now, host);
            }
        }
    }

    /// Handles the expired deadline of a host's watcher.
    fn handle_deadline(&mut self, now: Micros, host: HostId) {
        let Some(watcher) = self.hosts.get(&host) else {
            return;
        };
        match watcher.state {
            WatcherState::Wanted { .. } => {
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
                    self.late_orders.insert(wid);
                }
                self.schedule_retry(now, host);
            }
            WatcherState::Adopted { tid, .. } => {
                self.outputs.push_back(WatcherOutput::Terminate(tid));
                let text = format!(
                    "load watcher {tid} of {host}, started by an earlier resource manager, does not report; it is \
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

    /// Returns when [`Watchers::tick`] must be called. The time may be earlier than necessary.
    pub fn next_deadline(&self) -> Option<Micros> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Returns the next action.
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

    /// Starts the next watcher and lets it end after `span`. Returns the notes about it.
    fn run_and_end(watchers: &mut Watchers, number: u32, span: Micros) -> Vec<String> {
        let host = HostId::MASTER;
        let (wid, tid) = (
            number.cast_signed(),
            Tid::task(host, number).expect("a task"),
        );
        let now = watchers.next_deadline().expect("it is wanted");
        watchers.tick(now);
        watchers.order_sent(now, host, Some(wid));
        assert_eq!(
            watchers.order_acknowledged(now, wid, &Ok(vec![Ok(tid)])),
            Some(Some((host, tid)))
        );
        assert!(watchers.task_ended(now + span, tid));
        notes(watchers)
    }

    /// If a watcher repeatedly ends soon after its start, one note is recorded. The next note is
    /// possible only after a long run.
    #[test]
    fn repeated_short_runs_are_reported_once() {
        let mut watchers = Watchers::default();
        watchers.add(Micros(0), HostId::MASTER);
        let mut number = 0;
        let mut ends = |span: Micros| {
            number += 1;
            run_and_end(&mut watchers, number, span)
        };
        let (short, steady) = (Micros::from_millis(5), STEADY_RUN_MIN);
        for _ in 1..SHORT_RUNS_MAX {
            assert_eq!(ends(short), Vec::<String>::new());
        }
        let told = ends(short);
        let starts = |text: &String| {
            text.starts_with("load watcher of host 1 ended soon after its start 3 times in a row")
        };
        assert!(told.len() == 1 && told.iter().all(starts), "{told:?}");
        for _ in 0..2 * SHORT_RUNS_MAX {
            assert_eq!(ends(short), Vec::<String>::new(), "once is enough");
        }
        assert_eq!(ends(steady), Vec::<String>::new());
        for _ in 1..SHORT_RUNS_MAX {
            assert_eq!(ends(short), Vec::<String>::new());
        }
        assert_eq!(ends(short), told);
    }
}
