//! One load watcher per host: wanted, starting, running, and started again when it ends. Pure; the service sends what
//! [`Watchers::poll`] gives. With ten thousand hosts every message comes past here, so nothing looks at all of them.

use crate::recent::Recent;
use sempa_proto::{HostId, Micros, PvmError, PvmResult, Tid};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// How long a host may take to start one.
pub const START_TIME_MAX: Micros = Micros::from_secs(10);
/// Pause before the second attempt; twice as long after each failure, up to [`PAUSE_MAX`].
pub const PAUSE_MIN: Micros = Micros::from_millis(250);
/// Longest pause between attempts.
pub const PAUSE_MAX: Micros = Micros::from_secs(60);
/// A watcher that ran for so long has no failures behind it.
const STEADY: Micros = Micros::from_secs(30);
/// A watcher that has ended sooner than that so often in a row is told of.
const SHORT_MAX: u32 = 3;
/// A watcher that was not heard for so long is ended and replaced; it says something every ten seconds.
pub const SILENT_MAX: Micros = Micros::from_secs(45);
/// How long a watcher that an earlier resource manager has started may take to report here.
pub const ADOPT_TIME_MAX: Micros = Micros::from_secs(5);
/// Orders given up whose acknowledgement is still recognised.
const LATE_MAX: usize = 4096;

/// What the service is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Start a watcher on a host, and tell [`Watchers::sent`] about it.
    Start(HostId),
    /// Ask this watcher, which an earlier resource manager has started, to report here.
    Adopt(Tid),
    /// Ask to be told when this watcher ends.
    Notify(Tid),
    /// End this watcher.
    End(Tid),
    /// Something for the event log.
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
    /// How often in a row it has ended soon after its start.
    short: u32,
    told: Option<PvmError>,
}

/// The watchers of all hosts.
#[derive(Debug)]
pub struct Watchers {
    hosts: BTreeMap<HostId, Watcher>,
    /// When to look at each host. It may be early, because a watcher that is heard puts off its time and not this; and a host may
    /// be in here more than once.
    due: BTreeSet<(Micros, HostId)>,
    /// The orders that are not acknowledged, and the watchers that are there.
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
    /// When the next attempt is made after one that failed.
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

/// What is told of a host whose watcher ends again and again. Nobody collects what it says.
fn never_steady(host: HostId) -> String {
    format!(
        "load watcher of {host} ends at its start, {SHORT_MAX} times in a row: its owner is not guarded; what it said is \
         in the master's log; it is tried again"
    )
}

impl Watchers {
    /// A host has joined.
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

    /// A watcher is in another state from now on.
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

    /// It failed; the next attempt is made after a pause.
    fn failed(&mut self, now: Micros, host: HostId) {
        if let Some(state) = self
            .hosts
            .get_mut(&host)
            .map(|watcher| watcher.after_failure(now))
        {
            self.set(host, state);
        }
    }

    /// A watcher of an earlier resource manager is still there. It goes on, if none was started here meanwhile.
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

    /// A host has left.
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

    /// The order was sent with this wait id, or could not be sent.
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

    /// A host acknowledges. `None` when the wait id is none of ours; otherwise the watcher that now runs, if one does.
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
            // Nobody waits for it: it was given up, or it has reported already and is running.
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
                        "no load watcher on {host}: {error}; its load and its owner are unknown; it is tried again"
                    );
                    self.out.push_back(Output::Note(text));
                }
                Some(None)
            }
        }
    }

    /// A report claims to come from the watcher of a host. True when it does.
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
            // Its first report may overtake the acknowledgement of its host; or the host has started one itself.
            State::Starting { .. } | State::Wanted { .. } if src.home() == Some(from) => {
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
            // One is enough.
            State::Running { .. } if src.home() == Some(from) => {
                self.out.push_back(Output::End(src));
                return false;
            }
            _ => return false,
        }
        true
    }

    /// The host that this task watches.
    pub fn host_of(&self, task: Tid) -> Option<HostId> {
        self.tasks.get(&task).copied()
    }

    /// A task has ended. True when it was a watcher.
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

    /// Starts what is due, gives up what has taken too long.
    pub fn tick(&mut self, now: Micros) {
        while let Some((at, host)) = self.due.first().copied().filter(|(at, _)| *at <= now) {
            self.due.remove(&(at, host));
            let Some(due) = self.hosts.get(&host).map(Watcher::due) else {
                continue;
            };
            if due > now {
                // It was heard meanwhile.
                self.due.insert((due, host));
            } else {
                self.look_at(now, host);
            }
        }
    }

    /// The time of this watcher is over.
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
                    "load watcher {tid} of {host}, left by another resource manager, is silent; it is replaced"
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

    /// When [`Watchers::tick`] has something to do; it may be a little early.
    pub fn next_deadline(&self) -> Option<Micros> {
        self.due.first().map(|(at, _)| *at)
    }

    /// What is to be done next.
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

    /// Has the next one started, which runs for so long and ends. Answers what is told.
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

    #[test]
    fn a_watcher_that_ends_at_its_start_again_and_again_is_told_of_once_until_one_was_steady() {
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
            text.starts_with("load watcher of host 1 ends at its start, 3 times in a row")
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
