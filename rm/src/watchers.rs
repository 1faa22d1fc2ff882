//! One load watcher per host: wanted, starting, running, and started again when it ends. Pure; the service sends what
//! [`Watchers::poll`] gives.

use crate::recent::Recent;
use sempa_proto::{HostId, Micros, PvmError, PvmResult, Tid};
use std::collections::{BTreeMap, VecDeque};

/// How long a host may take to start one.
pub const START_TIME_MAX: Micros = Micros::from_secs(10);
/// Pause before the second attempt; twice as long after each failure, up to [`PAUSE_MAX`].
pub const PAUSE_MIN: Micros = Micros::from_millis(250);
/// Longest pause between attempts.
pub const PAUSE_MAX: Micros = Micros::from_secs(60);
/// A watcher that ran for so long has no failures behind it.
const STEADY: Micros = Micros::from_secs(30);
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
    Wanted { at: Micros },
    Starting { wid: Option<i32>, until: Micros },
    Adopted { tid: Tid, until: Micros },
    Running { tid: Tid, since: Micros, heard: Micros },
}

#[derive(Debug)]
struct Watcher {
    state: State,
    failures: u32,
    told: Option<PvmError>,
}

/// The watchers of all hosts.
#[derive(Debug)]
pub struct Watchers {
    hosts: BTreeMap<HostId, Watcher>,
    late: Recent<i32>,
    out: VecDeque<Output>,
}

impl Default for Watchers {
    fn default() -> Watchers {
        Watchers { hosts: BTreeMap::new(), late: Recent::new(LATE_MAX), out: VecDeque::new() }
    }
}

impl Watcher {
    /// It failed; the next attempt is made after a pause.
    fn failed(&mut self, now: Micros) {
        let pause = Micros((PAUSE_MIN.0 << self.failures.min(12)).min(PAUSE_MAX.0));
        self.failures += 1;
        self.state = State::Wanted { at: now + pause };
    }
}

impl Watchers {
    /// A host has joined.
    pub fn add(&mut self, now: Micros, host: HostId) {
        let watcher = Watcher { state: State::Wanted { at: now }, failures: 0, told: None };
        self.hosts.entry(host).or_insert(watcher);
    }

    /// A watcher of an earlier resource manager is still there. It goes on, if none was started here meanwhile.
    pub fn found(&mut self, now: Micros, host: HostId, tid: Tid) {
        let Some(watcher) = self.hosts.get_mut(&host) else { return };
        if matches!(watcher.state, State::Wanted { .. }) {
            watcher.state = State::Adopted { tid, until: now + ADOPT_TIME_MAX };
            self.out.extend([Output::Adopt(tid), Output::Notify(tid)]);
        }
    }

    /// A host has left.
    pub fn remove(&mut self, host: HostId) {
        if let Some(Watcher { state: State::Starting { wid: Some(wid), .. }, .. }) = self.hosts.remove(&host) {
            self.late.put(wid);
        }
    }

    /// The order was sent with this wait id, or could not be sent.
    pub fn sent(&mut self, now: Micros, host: HostId, wid: Option<i32>) {
        let Some(watcher) = self.hosts.get_mut(&host) else { return };
        match wid {
            Some(wid) => watcher.state = State::Starting { wid: Some(wid), until: now + START_TIME_MAX },
            None => watcher.failed(now),
        }
    }

    /// A host acknowledges. `None` when the wait id is none of ours; otherwise the watcher that now runs, if one does.
    pub fn ack(
        &mut self,
        now: Micros,
        wid: i32,
        started: &PvmResult<Vec<PvmResult<Tid>>>,
    ) -> Option<Option<(HostId, Tid)>> {
        let result =
            started.as_ref().map_or_else(|e| Err(*e), |s| s.first().copied().unwrap_or(Err(PvmError::DSysErr)));
        let ours = |w: &Watcher| matches!(w.state, State::Starting { wid: Some(own), .. } if own == wid);
        let Some((host, watcher)) = self.hosts.iter_mut().find(|(_, w)| ours(w)) else {
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
                watcher.state = State::Running { tid, since: now, heard: now };
                watcher.told = None;
                self.out.push_back(Output::Notify(tid));
                Some(Some((*host, tid)))
            }
            Err(error) => {
                watcher.failed(now);
                if watcher.told != Some(error) {
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
        let Some(watcher) = self.hosts.get_mut(&from) else { return false };
        match &mut watcher.state {
            State::Running { tid, heard, .. } if *tid == src => {
                *heard = now;
                true
            }
            State::Adopted { tid, .. } if *tid == src => {
                watcher.state = State::Running { tid: src, since: now, heard: now };
                true
            }
            // Its first report may overtake the acknowledgement of its host; or the host has started one itself.
            State::Starting { .. } | State::Wanted { .. } if src.home() == Some(from) => {
                if let State::Starting { wid: Some(wid), .. } = watcher.state {
                    self.late.put(wid);
                }
                watcher.state = State::Running { tid: src, since: now, heard: now };
                self.out.push_back(Output::Notify(src));
                true
            }
            // One is enough.
            State::Running { .. } if src.home() == Some(from) => {
                self.out.push_back(Output::End(src));
                false
            }
            _ => false,
        }
    }

    /// The host that this task watches.
    pub fn host_of(&self, task: Tid) -> Option<HostId> {
        let is =
            |w: &Watcher| matches!(w.state, State::Running { tid, .. } | State::Adopted { tid, .. } if tid == task);
        self.hosts.iter().find(|(_, w)| is(w)).map(|(host, _)| *host)
    }

    /// A task has ended. True when it was a watcher.
    pub fn ended(&mut self, now: Micros, task: Tid) -> bool {
        let Some(watcher) = self.host_of(task).and_then(|host| self.hosts.get_mut(&host)) else { return false };
        if let State::Running { since, .. } = watcher.state
            && now.since(since) >= STEADY
        {
            watcher.failures = 0;
        }
        watcher.failed(now);
        true
    }

    /// Starts what is due, gives up what has taken too long.
    pub fn tick(&mut self, now: Micros) {
        for (host, watcher) in &mut self.hosts {
            match watcher.state {
                State::Wanted { at } if at <= now => {
                    watcher.state = State::Starting { wid: None, until: now + START_TIME_MAX };
                    self.out.push_back(Output::Start(*host));
                }
                State::Starting { wid, until } if until <= now => {
                    if let Some(wid) = wid {
                        self.late.put(wid);
                    }
                    watcher.failed(now);
                }
                State::Adopted { tid, until } if until <= now => {
                    self.out.push_back(Output::End(tid));
                    let text = format!(
                        "load watcher {tid} of {host}, left by another resource manager, is silent; it is replaced"
                    );
                    self.out.push_back(Output::Note(text));
                    watcher.failed(now);
                }
                State::Running { tid, heard, .. } if now.since(heard) >= SILENT_MAX => {
                    self.out.push_back(Output::End(tid));
                    let text = format!(
                        "load watcher {tid} of {host} was silent for {} s; it is replaced",
                        SILENT_MAX.0 / 1_000_000
                    );
                    self.out.push_back(Output::Note(text));
                    watcher.failed(now);
                }
                _ => {}
            }
        }
    }

    /// When [`Watchers::tick`] has something to do.
    pub fn next_deadline(&self) -> Option<Micros> {
        let due = |w: &Watcher| match w.state {
            State::Wanted { at } => at,
            State::Starting { until, .. } | State::Adopted { until, .. } => until,
            State::Running { heard, .. } => heard + SILENT_MAX,
        };
        self.hosts.values().map(due).min()
    }

    /// What is to be done next.
    pub fn poll(&mut self) -> Option<Output> {
        self.out.pop_front()
    }
}
