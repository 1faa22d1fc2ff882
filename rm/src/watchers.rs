//! One load watcher per host: wanted, starting, running, and restarted when it ends. Pure; the
//! service carries out the output of [`Watchers::poll`].
//!
//! With ten thousand hosts every report passes through here, so no operation visits all hosts.

use crate::recent::Recent;
use sempa_proto::{HostId, Micros, PvmError, PvmResult, Tid};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// Timeout for starting a watcher on a host.
pub const START_TIME_MAX: Micros = Micros::from_secs(10);
/// Delay before the second attempt. Doubles after each failure, up to [`PAUSE_MAX`].
pub const PAUSE_MIN: Micros = Micros::from_millis(250);
/// Maximum delay between attempts.
pub const PAUSE_MAX: Micros = Micros::from_secs(60);
/// A watcher that ran for this time resets the count of failures.
const STEADY: Micros = Micros::from_secs(30);
/// Number of consecutive short runs after which a watcher is reported.
const SHORT_MAX: u32 = 3;
/// A watcher that was silent for this time is terminated and replaced. Watchers report every ten
/// seconds.
pub const SILENT_MAX: Micros = Micros::from_secs(45);
/// Timeout for the first report of a watcher that an earlier resource manager started.
pub const ADOPT_TIME_MAX: Micros = Micros::from_secs(5);
/// Maximum number of abandoned orders whose late acknowledgement is recognized.
const LATE_MAX: usize = 4096;

/// Action for the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Start a watcher on a host, then call [`Watchers::sent`].
    Start(HostId),
    /// Ask this watcher of an earlier resource manager to report here.
    Adopt(Tid),
    /// Request a notification of this watcher's end.
    Notify(Tid),
    End(Tid),
    /// Add a note to the event log.
    Note(String),
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    Wanted {
        at: Micros,
    },
    Starting {
        wid: Option<i32>,
        until: Micros,
    },
    Adopted {
        tid: Tid,
        until: Micros,
    },
    Running {
        tid: Tid,
        since: Micros,
        heard: Micros,
    },
}

#[derive(Debug)]
struct Watcher {
    state: State,
    failures: u32,
    /// Number of consecutive runs that ended soon after their start.
    short: u32,
    told: Option<PvmError>,
}

/// The watchers of all hosts.
#[derive(Debug)]
pub struct Watchers {
    hosts: BTreeMap<HostId, Watcher>,
    /// When to check each host. An entry may be early, because a report postpones the deadline but
    /// not the entry. A host may have several entries.
    due: BTreeSet<(Micros, HostId)>,
    /// Unacknowledged orders by wait id, and running watchers by task.
    starting: HashMap<i32, HostId>,
    tasks: HashMap<Tid, HostId>,
    late: Recent<i32>,
    out: VecDeque<Output>,
}

impl Default for Watchers {
    fn default() -> Watchers {
        let (starting, tasks) = (HashMap::new(), HashMap::new());
        let (hosts, due) = (BTreeMap::new(), BTreeSet::new());
        Watchers {
            hosts,
            due,
            starting,
            tasks,
            late: Recent::new(LATE_MAX),
            out: VecDeque::new(),
        }
    }
}

impl Watcher {
    /// Returns the state after a failed attempt, with the time of the next one.
    fn after_failure(&mut self, now: Micros) -> State {
        let pause = Micros((PAUSE_MIN.0 << self.failures.min(12)).min(PAUSE_MAX.0));
        self.failures += 1;
        State::Wanted { at: now + pause }
    }

    fn due(&self) -> Micros {
        match self.state {
            State::Wanted { at } => at,
            State::Starting { until, .. } | State::Adopted { until, .. } => until,
            State::Running { heard, .. } => heard + SILENT_MAX,
        }
    }

    fn task(&self) -> Option<Tid> {
        match self.state {
            State::Running { tid, .. } | State::Adopted { tid, .. } => Some(tid),
            State::Wanted { .. } | State::Starting { .. } => None,
        }
    }

    fn order(&self) -> Option<i32> {
        match self.state {
            State::Starting { wid, .. } => wid,
            _ => None,
        }
    }
}

/// Returns the note about a host whose watcher keeps ending. Its output is not collected here.
fn never_steady(host: HostId) -> String {
    format!(
        "load watcher of {host} ended soon after its start {SHORT_MAX} times in a row: its owner is not protected; \
         its output is in the master's log; it is started again"
    )
}

impl Watchers {
    /// Adds a host that has joined.
    pub fn add(&mut self, now: Micros, host: HostId) {
        let watcher = Watcher {
            state: State::Wanted { at: now },
            failures: 0,
            short: 0,
            told: None,
        };
        self.hosts.entry(host).or_insert(watcher);
        self.due.insert((now, host));
    }

    /// Changes the state of a watcher.
    fn set(&mut self, host: HostId, state: State) {
        let Some(watcher) = self.hosts.get_mut(&host) else {
            return;
        };
        watcher.order().map(|wid| self.starting.remove(&wid));
        watcher.task().map(|tid| self.tasks.remove(&tid));
        watcher.state = state;
        self.starting.extend(watcher.order().map(|wid| (wid, host)));
        self.tasks.extend(watcher.task().map(|tid| (tid, host)));
        self.due.insert((watcher.due(), host));
    }

    /// Schedules the next attempt after a failure.
    fn failed(&mut self, now: Micros, host: HostId) {
        if let Some(state) = self
            .hosts
            .get_mut(&host)
            .map(|watcher| watcher.after_failure(now))
        {
            self.set(host, state);
        }
    }

    /// Adopts a running watcher of an earlier resource manager, unless one was started here
    /// meanwhile.
    pub fn found(&mut self, now: Micros, host: HostId, tid: Tid) {
        if self
            .hosts
            .get(&host)
            .is_some_and(|watcher| matches!(watcher.state, State::Wanted { .. }))
        {
            self.set(
                host,
                State::Adopted {
                    tid,
                    until: now + ADOPT_TIME_MAX,
                },
            );
            self.out.extend([Output::Adopt(tid), Output::Notify(tid)]);
        }
    }

    /// Removes a host that has left.
    pub fn remove(&mut self, host: HostId) {
        let Some(watcher) = self.hosts.remove(&host) else {
            return;
        };
        watcher.task().map(|tid| self.tasks.remove(&tid));
        if let Some(wid) = watcher.order() {
            self.starting.remove(&wid);
            self.late.put(wid);
        }
    }

    /// Records that the order was sent with this wait id, or could not be sent (`None`).
    pub fn sent(&mut self, now: Micros, host: HostId, wid: Option<i32>) {
        match wid {
            Some(wid) => self.set(
                host,
                State::Starting {
                    wid: Some(wid),
                    until: now + START_TIME_MAX,
                },
            ),
            None => self.failed(now, host),
        }
    }

    /// Handles a host's acknowledgement. `None` if the wait id is unknown; otherwise the watcher
    /// that runs, if one does.
    pub fn ack(
        &mut self,
        now: Micros,
        wid: i32,
        started: &PvmResult<Vec<PvmResult<Tid>>>,
    ) -> Option<Option<(HostId, Tid)>> {
        let result = started.as_ref().map_or_else(
            |e| Err(*e),
            |s| s.first().copied().unwrap_or(Err(PvmError::DSysErr)),
        );
        let Some(host) = self.starting.get(&wid).copied() else {
            if !self.late.has(wid) {
                return None;
            }
            // The order was abandoned, or the watcher has reported already and is running.
            if let Ok(tid) = result.map_err(|_| ())
                && self.host_of(tid).is_none()
            {
                self.out.push_back(Output::End(tid));
            }
            return Some(None);
        };
        match result {
            Ok(tid) => {
                self.set(
                    host,
                    State::Running {
                        tid,
                        since: now,
                        heard: now,
                    },
                );
                self.hosts
                    .get_mut(&host)
                    .into_iter()
                    .for_each(|watcher| watcher.told = None);
                self.out.push_back(Output::Notify(tid));
                Some(Some((host, tid)))
            }
            Err(error) => {
                self.failed(now, host);
                if let Some(watcher) = self
                    .hosts
                    .get_mut(&host)
                    .filter(|watcher| watcher.told != Some(error))
                {
                    watcher.told = Some(error);
                    let text = format!(
                        "no load watcher on {host}: {error}; its load and its owner are unknown; the start is retried"
                    );
                    self.out.push_back(Output::Note(text));
                }
                Some(None)
            }
        }
    }

    /// Handles a report that claims to come from the watcher of a host. True if it does.
    pub fn heard(&mut self, now: Micros, src: Tid, from: HostId) -> bool {
        let Some(watcher) = self.hosts.get_mut(&from) else {
            return false;
        };
        match &mut watcher.state {
            State::Running { tid, heard, .. } if *tid == src => *heard = now,
            State::Adopted { tid, .. } if *tid == src => {
                self.set(
                    from,
                    State::Running {
                        tid: src,
                        since: now,
                        heard: now,
                    },
                );
            }
            // The first report may arrive before the host's acknowledgement, or the host has
            // started a watcher itself.
            State::Starting { .. } | State::Wanted { .. } if src.birth_host() == Some(from) => {
                if let State::Starting { wid: Some(wid), .. } = watcher.state {
                    self.late.put(wid);
                }
                self.set(
                    from,
                    State::Running {
                        tid: src,
                        since: now,
                        heard: now,
                    },
                );
                self.out.push_back(Output::Notify(src));
            }
            // The host has a second watcher.
            State::Running { .. } if src.birth_host() == Some(from) => {
                self.out.push_back(Output::End(src));
                return false;
            }
            _ => return false,
        }
        true
    }

    /// Returns the host that this task watches.
    pub fn host_of(&self, task: Tid) -> Option<HostId> {
        self.tasks.get(&task).copied()
    }

    /// Handles the end of a task. True if it was a watcher.
    pub fn ended(&mut self, now: Micros, task: Tid) -> bool {
        let Some(host) = self.host_of(task) else {
            return false;
        };
        if let Some(watcher) = self.hosts.get_mut(&host)
            && let State::Running { since, .. } = watcher.state
        {
            if now.since(since) >= STEADY {
                (watcher.failures, watcher.short) = (0, 0);
            } else {
                watcher.short = watcher.short.saturating_add(1);
                if watcher.short == SHORT_MAX {
                    self.out.push_back(Output::Note(never_steady(host)));
                }
            }
        }
        self.failed(now, host);
        true
    }

    /// Starts watchers that are due and gives up those that took too long.
    pub fn tick(&mut self, now: Micros) {
        while let Some((at, host)) = self.due.first().copied().filter(|(at, _)| *at <= now) {
            self.due.remove(&(at, host));
            let Some(due) = self.hosts.get(&host).map(Watcher::due) else {
                continue;
            };
            if due > now {
                // The watcher has reported meanwhile.
                self.due.insert((due, host));
            } else {
                self.look_at(now, host);
            }
        }
    }

    /// Handles the deadline of a watcher.
    fn look_at(&mut self, now: Micros, host: HostId) {
        let Some(watcher) = self.hosts.get(&host) else {
            return;
        };
        match watcher.state {
            State::Wanted { .. } => {
                self.set(
                    host,
                    State::Starting {
                        wid: None,
                        until: now + START_TIME_MAX,
                    },
                );
                self.out.push_back(Output::Start(host));
            }
            State::Starting { wid, .. } => {
                if let Some(wid) = wid {
                    self.late.put(wid);
                }
                self.failed(now, host);
            }
            State::Adopted { tid, .. } => {
                self.out.push_back(Output::End(tid));
                let text = format!(
                    "load watcher {tid} of {host}, started by an earlier resource manager, does not report; it is \
                     replaced"
                );
                self.out.push_back(Output::Note(text));
                self.failed(now, host);
            }
            State::Running { tid, .. } => {
                self.out.push_back(Output::End(tid));
                let seconds = SILENT_MAX.0 / 1_000_000;
                let text = format!(
                    "load watcher {tid} of {host} was silent for {seconds} s; it is replaced"
                );
                self.out.push_back(Output::Note(text));
                self.failed(now, host);
            }
        }
    }

    /// Returns when [`Watchers::tick`] is due, or slightly earlier.
    pub fn next_deadline(&self) -> Option<Micros> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Returns the next action.
    pub fn poll(&mut self) -> Option<Output> {
        self.out.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(watchers: &mut Watchers) -> Vec<String> {
        let note = |output| {
            if let Output::Note(text) = output {
                Some(text)
            } else {
                None
            }
        };
        std::iter::from_fn(|| watchers.poll())
            .filter_map(note)
            .collect()
    }

    /// Starts the next watcher, which runs for `span` and ends. Returns the notes about it.
    fn runs(watchers: &mut Watchers, number: u32, span: Micros) -> Vec<String> {
        let host = HostId::MASTER;
        let (wid, tid) = (
            number.cast_signed(),
            Tid::task(host, number).expect("a task"),
        );
        let now = watchers.next_deadline().expect("it is wanted");
        watchers.tick(now);
        watchers.sent(now, host, Some(wid));
        assert_eq!(
            watchers.ack(now, wid, &Ok(vec![Ok(tid)])),
            Some(Some((host, tid)))
        );
        assert!(watchers.ended(now + span, tid));
        notes(watchers)
    }

    /// A watcher that repeatedly ends at its start is reported once, and again only after a steady
    /// run.
    #[test]
    fn repeated_short_runs_are_reported_once() {
        let mut watchers = Watchers::default();
        watchers.add(Micros(0), HostId::MASTER);
        let mut number = 0;
        let mut ends = |span: Micros| {
            number += 1;
            runs(&mut watchers, number, span)
        };
        let (short, steady) = (Micros::from_millis(5), STEADY);
        for _ in 1..SHORT_MAX {
            assert_eq!(ends(short), Vec::<String>::new());
        }
        let told = ends(short);
        let starts = |text: &String| {
            text.starts_with("load watcher of host 1 ended soon after its start 3 times in a row")
        };
        assert!(told.len() == 1 && told.iter().all(starts), "{told:?}");
        for _ in 0..2 * SHORT_MAX {
            assert_eq!(ends(short), Vec::<String>::new(), "once is enough");
        }
        assert_eq!(ends(steady), Vec::<String>::new());
        for _ in 1..SHORT_MAX {
            assert_eq!(ends(short), Vec::<String>::new());
        }
        assert_eq!(ends(short), told);
    }
}
