//! Derives from all signs whether the owner of this host is absent, possibly present, or present,
//! with a confidence and a reason. Pure.
//!
//! Each source is available, or unavailable with a reason. An unavailable source counts neither for
//! nor against the presence of an owner. [`Sense::verdict`] checks the signs in this order; the
//! first that applies decides:
//!
//! 1. an owner's override "here": present;
//! 2. a login with recent input, or with input that no source can tell: present (an override "away"
//!    hides the user's own logins, or all logins if its user counts as the owner of the whole
//!    machine);
//! 3. an override "away", with no other login left: absent;
//! 4. recent input of keyboard or mouse without a login: present;
//! 5. a login without recent input: possibly present;
//! 6. high external load: possibly present;
//! 7. otherwise absent.

use crate::sessions::{Idle, Session, all_logins};
use crate::word::{Said, State, Word};
use sempa_proto::Micros;
use sempa_proto::load::{Login, OwnerVerdict};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Time after input at keyboard or mouse during which a person without a login (at a greeter)
/// counts as present.
pub const KEYS_SPAN: Micros = Micros::from_secs(300);
/// External load, in processors, from which somebody possibly uses the machine.
pub const FOREIGN_HIGH: f32 = 0.5;
/// External load, in processors, below which this ends again.
pub const FOREIGN_LOW: f32 = 0.25;
/// Minimum age of an override that a logout ends, so that a user can set one and then log out.
const JUST_SAID: Micros = Micros::from_secs(2);

/// Result of reading the login records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Records {
    /// Users who are logged in, earliest first.
    Logins(Vec<Login>),
    /// The file does not exist.
    Missing,
    /// The file cannot be read, with the system's error text.
    Unreadable(String),
}

/// Information of one source.
#[derive(Clone, Debug, PartialEq)]
pub enum Evidence<T> {
    Known(T),
    /// The source is unavailable, with the reason.
    Missing(String),
}

/// Use of keyboard and mouse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keys {
    /// Time since when they are observed.
    pub watched: Micros,
    /// Time of the last observed use.
    pub used: Option<Micros>,
}

/// An owner's override and its user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spoken {
    pub uid: u32,
    pub user: String,
    pub word: Word,
}

/// All signs at one moment. Times are times of day.
#[derive(Clone, Debug)]
pub struct Signs<'a> {
    /// Path of the login records.
    pub path: &'a Path,
    pub records: &'a Records,
    /// Sessions that systemd-logind knows.
    pub sessions: &'a Evidence<Vec<Session>>,
    /// Why logind cannot be queried over D-Bus; the sessions then come from its files. `None` if
    /// they come from logind.
    pub unasked: Option<&'a str>,
    /// Time of the last input at the terminal of each login. A line is missing if its terminal
    /// cannot be examined.
    pub typed: &'a BTreeMap<String, Micros>,
    pub keys: &'a Evidence<Keys>,
    /// Mean number of processors that programs outside of the virtual machine use.
    pub foreign: &'a Evidence<f32>,
    /// Overrides of all users.
    pub words: &'a [Spoken],
    /// Users who count as owners in addition to root; `None` if all users do.
    pub owners: Option<&'a [String]>,
    /// Time without input after which a login counts as possibly absent.
    pub idle_after: Micros,
}

/// The verdict on the owner with its explanation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sensed {
    pub owner: OwnerVerdict,
    /// Confidence of the verdict in percent.
    pub confidence: u8,
    /// The reason, as one plain sentence.
    pub why: String,
    /// The logins on which the verdict is based.
    pub logins: Vec<Login>,
    /// Name and state of each source.
    pub sources: Vec<(&'static str, String)>,
}

/// Derives verdicts, and remembers since when the current state holds.
#[derive(Debug, Default)]
pub struct Sense {
    seen: Option<Micros>,
    maybe: Option<Micros>,
    left: Option<Micros>,
    /// External load was high and has not been low since.
    loaded: bool,
    visits: Option<BTreeSet<(String, Micros)>>,
    /// Overrides that a login or logout has ended: uid and time of each.
    over: BTreeSet<(u32, Micros)>,
}

/// Formats a time of day (UTC) for a sentence.
pub fn clock(at: Micros) -> String {
    let seconds = at.0 / 1_000_000 % 86_400;
    format!(
        "{:02}:{:02}:{:02} UTC",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60
    )
}

/// Returns a phrase such as "alice is logged in on pts/3 from h9".
fn logged_in(login: &Login) -> String {
    let from = if login.from.is_empty() {
        String::new()
    } else {
        format!(" from {}", login.from)
    };
    format!("{} is logged in on {}{from}", login.user, login.line)
}

fn and_more(others: usize) -> String {
    if others > 0 {
        format!(", and {others} more")
    } else {
        String::new()
    }
}

/// Returns the users who are logged in according to the available sources, earliest first.
pub fn logins(records: &Records, sessions: &Evidence<Vec<Session>>) -> Vec<Login> {
    let records = match records {
        Records::Logins(logins) => logins.as_slice(),
        Records::Missing | Records::Unreadable(_) => &[],
    };
    let sessions = match sessions {
        Evidence::Known(sessions) => sessions.as_slice(),
        Evidence::Missing(_) => &[],
    };
    all_logins(records, sessions)
}

impl Signs<'_> {
    /// Returns the time of the last input of a login; `None` if no source can tell. Input at a
    /// screen does not pass through the terminal of its session.
    fn last_input(&self, now: Micros, login: &Login) -> Option<Micros> {
        let Login { line, from, .. } = login;
        // A login record of a screen has the display or the terminal in its `from` field.
        let of_screen = line.starts_with(':') || from.starts_with(':') || from == line;
        let keys = match self.keys {
            Evidence::Known(keys) if from.is_empty() || of_screen => {
                Some(keys.used.unwrap_or(keys.watched))
            }
            _ => None,
        };
        let is_its =
            |s: &&Session| s.login.line == *line || (of_screen && s.login.user == login.user);
        let session = self.screens().find(is_its);
        let typed = self
            .typed
            .get(line)
            .copied()
            .filter(|_| !of_screen && session.is_none());
        let told = match session.map(|s| s.idle) {
            // Some desktops never report idleness. Keyboard interrupts are more reliable if they
            // were ever observed.
            Some(Idle::InUse)
                if !matches!(self.keys, Evidence::Known(Keys { used: Some(_), .. })) =>
            {
                Some(now)
            }
            Some(Idle::Since(at)) => Some(at),
            Some(Idle::InUse | Idle::Unknown) | None => None,
        };
        let last = typed.into_iter().chain(keys).chain(told).max()?;
        Some(last.max(login.at))
    }

    /// Returns the sessions with a screen.
    fn screens(&self) -> impl Iterator<Item = &Session> {
        let all = match self.sessions {
            Evidence::Known(sessions) => sessions.as_slice(),
            Evidence::Missing(_) => &[],
        };
        all.iter().filter(|s| s.graphical)
    }

    /// Describes what desktops report about their screens.
    fn screens_say(&self, now: Micros) -> String {
        if let Some(why) = self.unasked {
            return format!("not available: {why}");
        }
        let says = |s: &Session| match s.idle {
            Idle::Unknown => format!("{} does not say", s.login.line),
            Idle::InUse => format!("{} in use", s.login.line),
            Idle::Since(at) => format!(
                "{} without input {} s",
                s.login.line,
                now.since(at).0 / 1_000_000
            ),
        };
        let all: Vec<String> = self.screens().map(says).collect();
        if all.is_empty() {
            "nobody has one".into()
        } else {
            all.join(", ")
        }
    }

    fn may_speak(&self, spoken: &Spoken) -> bool {
        let named = |owners: &[String]| owners.contains(&spoken.user);
        spoken.uid == 0 || self.owners.is_none_or(named)
    }

    /// True if this user's override applies to the whole machine, not only to the user's own
    /// logins.
    fn speaks_for_all(&self, spoken: &Spoken) -> bool {
        spoken.uid == 0 || self.owners.is_some()
    }

    /// True if no source can tell who is logged in.
    fn is_blind(&self) -> bool {
        !matches!(self.records, Records::Logins(_)) && matches!(self.sessions, Evidence::Missing(_))
    }

    fn sources(&self, now: Micros, logins: &[Login]) -> Vec<(&'static str, String)> {
        let count = |n: usize| {
            if n == 1 {
                "1 login".to_string()
            } else {
                format!("{n} logins")
            }
        };
        let mut all = Vec::new();
        all.push((
            "logins",
            match self.records {
                Records::Logins(list) => count(list.len()),
                Records::Missing => {
                    format!("not available: {} does not exist", self.path.display())
                }
                Records::Unreadable(why) => format!(
                    "not available: {} cannot be read: {why}",
                    self.path.display()
                ),
            },
        ));
        all.push((
            "sessions",
            match self.sessions {
                Evidence::Known(list) => format!("{} of people", list.len()),
                Evidence::Missing(why) => format!("not available: {why}"),
            },
        ));
        let idle = |login: &Login| {
            let last = self.typed.get(&login.line)?;
            Some(format!(
                "{} {} s",
                login.line,
                now.since(*last).0 / 1_000_000
            ))
        };
        let idle: Vec<String> = logins.iter().filter_map(idle).collect();
        let none = if logins.is_empty() {
            "nobody is logged in"
        } else {
            "not available: no terminal can be looked at"
        };
        all.push((
            "terminals",
            if idle.is_empty() {
                none.into()
            } else {
                format!("without input: {}", idle.join(", "))
            },
        ));
        all.push(("screens", self.screens_say(now)));
        all.push((
            "keyboard and mouse",
            match self.keys {
                Evidence::Known(Keys { used: Some(at), .. }) => format!("last used {}", clock(*at)),
                Evidence::Known(Keys { watched, .. }) => {
                    format!("not used since {}", clock(*watched))
                }
                Evidence::Missing(why) => format!("not available: {why}"),
            },
        ));
        all.push((
            "other programs",
            match self.foreign {
                Evidence::Known(cores) => format!("use {cores:.1} processors"),
                Evidence::Missing(why) => format!("not available: {why}"),
            },
        ));
        let say = |spoken: &Spoken| {
            let Said { state, until, .. } = spoken.word.said?;
            let said = if state == State::Here { "here" } else { "away" };
            Some(format!(
                "{} said {said:?}, until {}",
                spoken.user,
                clock(until)
            ))
        };
        let words: Vec<String> = self.words.iter().filter_map(say).collect();
        all.push((
            "owner's word",
            if words.is_empty() {
                "none".into()
            } else {
                words.join("; ")
            },
        ));
        all
    }
}

/// A verdict without the remembered times.
enum Found {
    Present {
        since: Option<Micros>,
        confidence: u8,
        why: String,
    },
    Maybe {
        since: Option<Micros>,
        confidence: u8,
        why: String,
    },
    Absent {
        confidence: u8,
        why: String,
    },
}

impl Sense {
    /// Returns the verdict at `now` (time of day).
    pub fn verdict(&mut self, now: Micros, signs: &Signs<'_>) -> Sensed {
        let all = logins(signs.records, signs.sessions);
        self.end_words(now, signs, &all);
        let valid = |s: &&Spoken| {
            let said = s.word.said.as_ref();
            let over = |said: &Said| self.over.contains(&(s.uid, said.at));
            signs.may_speak(s)
                && said.is_some_and(|said| now < said.until && !(said.visit && over(said)))
        };
        let words: Vec<&Spoken> = signs.words.iter().filter(valid).collect();
        let found = self.find(now, signs, &all, &words);
        let (owner, confidence, why) = self.remember(now, found);
        let sources = signs.sources(now, &all);
        Sensed {
            owner,
            confidence,
            why,
            logins: all,
            sources,
        }
    }

    /// Ends overrides: a login that is later than an override ends it, and so does a logout.
    fn end_words(&mut self, now: Micros, signs: &Signs<'_>, logins: &[Login]) {
        let visits: BTreeSet<(String, Micros)> =
            logins.iter().map(|l| (l.line.clone(), l.at)).collect();
        let left = self
            .visits
            .as_ref()
            .is_some_and(|before| before.iter().any(|visit| !visits.contains(visit)));
        let newest = logins.iter().map(|l| l.at).max();
        let said = |s: &Spoken| Some((s.uid, s.word.said?));
        let known: Vec<(u32, Said)> = signs.words.iter().filter_map(said).collect();
        // Forget ended overrides that no longer exist.
        self.over
            .retain(|(uid, at)| known.iter().any(|(u, said)| (u, said.at) == (uid, *at)));
        for (uid, said) in known {
            let came = newest.is_some_and(|at| at > said.at);
            if came || (left && now.since(said.at) > JUST_SAID) {
                self.over.insert((uid, said.at));
            }
        }
        self.visits = Some(visits);
    }

    fn find(&mut self, now: Micros, signs: &Signs<'_>, all: &[Login], words: &[&Spoken]) -> Found {
        let here = |s: &&Spoken| {
            Some((
                s.user.clone(),
                s.word.said.filter(|said| said.state == State::Here)?,
            ))
        };
        if let Some((user, Said { at, until, .. })) = words.iter().find_map(here) {
            let why = format!(
                "{user} said \"here\" at {}, until {}",
                clock(at),
                clock(until)
            );
            return Found::Present {
                since: Some(at),
                confidence: 100,
                why,
            };
        }
        let away: Vec<&Spoken> = words
            .iter()
            .filter(|s| s.word.said.is_some_and(|said| said.state == State::Away))
            .copied()
            .collect();
        let hidden = |login: &Login| {
            away.iter()
                .any(|s| signs.speaks_for_all(s) || s.user == login.user)
        };
        let logins: Vec<&Login> = all.iter().filter(|login| !hidden(login)).collect();
        if let Some(found) = at_the_machine(now, signs, &logins) {
            return found;
        }
        if let (Some(spoken), true) = (away.first(), logins.is_empty()) {
            let until = spoken
                .word
                .said
                .map(|said| clock(said.until))
                .unwrap_or_default();
            let why = format!("{} said \"away\", until {until}", spoken.user);
            return Found::Absent {
                confidence: 100,
                why,
            };
        }
        if let Evidence::Known(Keys { used: Some(at), .. }) = signs.keys
            && logins.is_empty()
            && now.since(*at) < KEYS_SPAN
        {
            let why = "somebody uses keyboard or mouse and is not logged in".to_string();
            return Found::Present {
                since: None,
                confidence: 85,
                why,
            };
        }
        if let Some(last) = logins
            .iter()
            .filter_map(|login| signs.last_input(now, login))
            .max()
        {
            let why = format!(
                "{}, without input since {}",
                logged_in(logins[0]),
                clock(last)
            );
            let hours = u8::try_from(now.since(last).0 / 3_600_000_000).unwrap_or(u8::MAX);
            let confidence = 60 - hours.saturating_mul(5).min(40);
            return Found::Maybe {
                since: Some(last),
                confidence,
                why: why + &and_more(logins.len() - 1),
            };
        }
        if let Evidence::Known(cores) = signs.foreign {
            self.loaded = *cores
                >= if self.loaded {
                    FOREIGN_LOW
                } else {
                    FOREIGN_HIGH
                };
            if self.loaded {
                let halves = (cores * 2.0).round().max(1.0) / 2.0;
                let why = format!("programs that are not ours use about {halves:.1} processors");
                return Found::Maybe {
                    since: None,
                    confidence: 50,
                    why,
                };
            }
        }
        nobody(signs)
    }

    fn remember(&mut self, now: Micros, found: Found) -> (OwnerVerdict, u8, String) {
        match found {
            Found::Present {
                since,
                confidence,
                why,
            } => {
                self.maybe = None;
                let seen = *self.seen.get_or_insert(now);
                (
                    OwnerVerdict::Present {
                        since: since.unwrap_or(seen),
                        seen,
                    },
                    confidence,
                    why,
                )
            }
            Found::Maybe {
                since,
                confidence,
                why,
            } => {
                self.left = self.seen.take().map_or(self.left, |_| Some(now));
                let first = *self.maybe.get_or_insert(now);
                (
                    OwnerVerdict::Maybe {
                        since: since.unwrap_or(first),
                    },
                    confidence,
                    why,
                )
            }
            Found::Absent { confidence, why } => {
                let was_there = self.seen.take().is_some() | self.maybe.take().is_some();
                self.left = if was_there { Some(now) } else { self.left };
                (OwnerVerdict::Absent { since: self.left }, confidence, why)
            }
        }
    }
}

/// Returns a finding if a user is logged in and not idle.
fn at_the_machine(now: Micros, signs: &Signs<'_>, logins: &[&Login]) -> Option<Found> {
    let idle = |login: &Login| signs.last_input(now, login).map(|at| now.since(at));
    let active = |login: &&&Login| idle(login).is_none_or(|span| span < signs.idle_after);
    let first = logins.iter().find(active)?;
    let confidence = match idle(first) {
        None => 90,
        Some(span) if span < Micros::from_secs(60) => 99,
        Some(_) => 95,
    };
    let why = format!(
        "{} since {}{}",
        logged_in(first),
        clock(first.at),
        and_more(logins.len() - 1)
    );
    Some(Found::Present {
        since: Some(first.at),
        confidence,
        why,
    })
}

fn nobody(signs: &Signs<'_>) -> Found {
    if !signs.is_blind() {
        let confidence = if matches!(signs.keys, Evidence::Known(_)) {
            95
        } else {
            90
        };
        return Found::Absent {
            confidence,
            why: "nobody is logged in".into(),
        };
    }
    let path = signs.path.display();
    let why = match signs.records {
        Records::Unreadable(why) => format!("logins are unknown: {path} cannot be read: {why}"),
        _ => format!("nobody is logged in: {path} does not exist"),
    };
    Found::Absent {
        confidence: 50,
        why,
    }
}

#[cfg(test)]
#[path = "owner_tests.rs"]
mod tests;
