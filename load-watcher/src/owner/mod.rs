//! Derives from all signs whether the owner of this host is absent, possibly present, or present,
//! with a confidence and a reason. Pure.
//!
//! Each source of signs is available, or unavailable with a reason. An unavailable source is no
//! evidence for or against the presence of an owner. [`OwnerDetector::verdict`] checks the signs in
//! this order; the first that applies determines the verdict:
//!
//! 1. an owner's override "here": present;
//! 2. a login with recent input, or a login whose input no source can observe: present (an override
//!    "away" hides the user's own logins, or all logins if its user is an owner of the whole
//!    machine);
//! 3. an override "away", if it hides all logins: absent;
//! 4. recent input of keyboard or mouse without a login: present;
//! 5. a login without recent input: possibly present;
//! 6. high external load: possibly present;
//! 7. otherwise absent.

use crate::owner_override::{DeclaredPresence, OwnerOverride, Presence};
use crate::sessions::{ScreenUse, Session, merge_logins};
use sempa_proto::Micros;
use sempa_proto::load::{Login, OwnerVerdict};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Time after input at keyboard or mouse during which a person without a login, for example at a
/// login screen, counts as present.
pub const GREETER_INPUT_WINDOW: Micros = Micros::from_secs(300);
/// External load, in processors, from which the owner is possibly present.
pub const EXTERNAL_LOAD_HIGH: f32 = 0.5;
/// External load, in processors, below which the load is low again after it was high.
pub const EXTERNAL_LOAD_LOW: f32 = 0.25;
/// Minimum age of an override that is ended by a logout. It allows users to set an override and
/// then log out.
const OVERRIDE_LOGOUT_AGE_MIN: Micros = Micros::from_secs(2);

/// Result of reading the login records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoginRecords {
    /// Users who are logged in, earliest first.
    Logins(Vec<Login>),
    /// The file does not exist.
    Missing,
    /// The file cannot be read; contains the system's error text.
    Unreadable(String),
}

/// The result of examining one source.
#[derive(Clone, Debug, PartialEq)]
pub enum Evidence<T> {
    Known(T),
    /// The source is unavailable; contains the reason.
    Unavailable(String),
}

/// Observed use of keyboard and mouse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputActivity {
    /// Time at which the observation started.
    pub watched_since: Micros,
    /// Time of the last observed use; `None` if no use was observed.
    pub last_used: Option<Micros>,
}

/// The override of one user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserOverride {
    pub uid: u32,
    pub user: String,
    pub owner_override: OwnerOverride,
}

/// All signs of the owner's presence at one moment. Times are times of day.
#[derive(Clone, Debug)]
pub struct OwnerSigns<'a> {
    /// Path of the file with the login records.
    pub records_path: &'a Path,
    pub records: &'a LoginRecords,
    /// Sessions that systemd-logind knows.
    pub sessions: &'a Evidence<Vec<Session>>,
    /// The reason why logind cannot be queried over D-Bus; the sessions then come from logind's
    /// files. `None` if the sessions come from logind itself.
    pub logind_error: Option<&'a str>,
    /// Time of the last input at the terminal of each login, by terminal line. A terminal that
    /// cannot be examined is missing.
    pub terminal_input: &'a BTreeMap<String, Micros>,
    pub input: &'a Evidence<InputActivity>,
    /// Mean number of processors that programs outside the virtual machine use.
    pub external_load: &'a Evidence<f32>,
    /// Overrides of all users.
    pub overrides: &'a [UserOverride],
    /// Names of the users who are owners in addition to root; `None` if all users are owners.
    pub owners: Option<&'a [String]>,
    /// Time without input after which the user of a login is only possibly present.
    pub idle_after: Micros,
}

/// The owner verdict with its explanation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OwnerAssessment {
    pub verdict: OwnerVerdict,
    /// Confidence in the verdict, in percent.
    pub confidence: u8,
    /// The reason for the verdict, in one sentence.
    pub reason: String,
    /// The logins on which the verdict is based.
    pub logins: Vec<Login>,
    /// Name of each source, and a description of its state.
    pub sources: Vec<(&'static str, String)>,
}

/// Derives owner verdicts, and records when the current state began.
#[derive(Debug, Default)]
pub struct OwnerDetector {
    present_since: Option<Micros>,
    maybe_since: Option<Micros>,
    last_logout_at: Option<Micros>,
    /// True if the external load was high and has not been low since.
    load_is_high: bool,
    visits: Option<BTreeSet<(String, Micros)>>,
    /// Overrides that were ended by a login or logout: uid and time of each declaration.
    ended_overrides: BTreeSet<(u32, Micros)>,
}

/// Formats a time of day as UTC, for a sentence.
pub fn format_utc_time(at: Micros) -> String {
    let seconds = at.0 / 1_000_000 % 86_400;
    format!(
        "{:02}:{:02}:{:02} UTC",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60
    )
}

/// Returns a phrase such as "alice is logged in on pts/3 from h9".
fn login_phrase(login: &Login) -> String {
    let from = if login.from.is_empty() {
        String::new()
    } else {
        format!(" from {}", login.from)
    };
    format!("{} is logged in on {}{from}", login.user, login.line)
}

fn other_logins_suffix(others: usize) -> String {
    if others > 0 {
        format!(", and {others} more")
    } else {
        String::new()
    }
}

/// Returns the users who are logged in according to the available sources, earliest first.
pub fn merged_logins(records: &LoginRecords, sessions: &Evidence<Vec<Session>>) -> Vec<Login> {
    let records = match records {
        LoginRecords::Logins(logins) => logins.as_slice(),
        LoginRecords::Missing | LoginRecords::Unreadable(_) => &[],
    };
    let sessions = match sessions {
        Evidence::Known(sessions) => sessions.as_slice(),
        Evidence::Unavailable(_) => &[],
    };
    merge_logins(records, sessions)
}

impl OwnerSigns<'_> {
    /// Returns the time of the last input of a login; `None` if no source can observe it. Input at
    /// a screen does not pass through the terminal of its session.
    fn last_input(&self, now: Micros, login: &Login) -> Option<Micros> {
        let Login { line, from, .. } = login;
        // In the login record of a screen, the `from` field contains the display or the terminal.
        let of_screen = line.starts_with(':') || from.starts_with(':') || from == line;
        let keys = match self.input {
            Evidence::Known(keys) if from.is_empty() || of_screen => {
                Some(keys.last_used.unwrap_or(keys.watched_since))
            }
            _ => None,
        };
        let is_its =
            |s: &&Session| s.login.line == *line || (of_screen && s.login.user == login.user);
        let session = self.screen_sessions().find(is_its);
        let terminal_input = self
            .terminal_input
            .get(line)
            .copied()
            .filter(|_| !of_screen && session.is_none());
        let desktop_input = match session.map(|s| s.screen_use) {
            // Some desktops never report that they are idle. Keyboard interrupts are more reliable,
            // if any were ever observed.
            Some(ScreenUse::InUse)
                if !matches!(
                    self.input,
                    Evidence::Known(InputActivity {
                        last_used: Some(_),
                        ..
                    })
                ) =>
            {
                Some(now)
            }
            Some(ScreenUse::IdleSince(at)) => Some(at),
            Some(ScreenUse::InUse | ScreenUse::Unknown) | None => None,
        };
        let last = terminal_input
            .into_iter()
            .chain(keys)
            .chain(desktop_input)
            .max()?;
        Some(last.max(login.at))
    }

    /// Returns the sessions with a screen.
    fn screen_sessions(&self) -> impl Iterator<Item = &Session> {
        let all = match self.sessions {
            Evidence::Known(sessions) => sessions.as_slice(),
            Evidence::Unavailable(_) => &[],
        };
        all.iter().filter(|s| s.graphical)
    }

    /// Describes what desktops report about their screens.
    fn describe_screens(&self, now: Micros) -> String {
        if let Some(why) = self.logind_error {
            return format!("not available: {why}");
        }
        let says = |s: &Session| match s.screen_use {
            ScreenUse::Unknown => format!("{} is not reported", s.login.line),
            ScreenUse::InUse => format!("{} in use", s.login.line),
            ScreenUse::IdleSince(at) => format!(
                "{} without input {} s",
                s.login.line,
                now.since(at).0 / 1_000_000
            ),
        };
        let all: Vec<String> = self.screen_sessions().map(says).collect();
        if all.is_empty() {
            "no session has a screen".into()
        } else {
            all.join(", ")
        }
    }

    fn counts_as_owner(&self, user_override: &UserOverride) -> bool {
        let named = |owners: &[String]| owners.contains(&user_override.user);
        user_override.uid == 0 || self.owners.is_none_or(named)
    }

    /// True if this user's override applies to the logins of all users, not only to the user's own
    /// logins.
    fn covers_all_users(&self, user_override: &UserOverride) -> bool {
        user_override.uid == 0 || self.owners.is_some()
    }

    /// True if no source can list the users who are logged in.
    fn logins_unavailable(&self) -> bool {
        !matches!(self.records, LoginRecords::Logins(_))
            && matches!(self.sessions, Evidence::Unavailable(_))
    }

    fn describe_sources(&self, now: Micros, logins: &[Login]) -> Vec<(&'static str, String)> {
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
                LoginRecords::Logins(list) => count(list.len()),
                LoginRecords::Missing => {
                    format!(
                        "not available: {} does not exist",
                        self.records_path.display()
                    )
                }
                LoginRecords::Unreadable(why) => format!(
                    "not available: {} cannot be read: {why}",
                    self.records_path.display()
                ),
            },
        ));
        all.push((
            "sessions",
            match self.sessions {
                Evidence::Known(list) => format!("{} sessions of people", list.len()),
                Evidence::Unavailable(why) => format!("not available: {why}"),
            },
        ));
        all.push(("terminals", self.describe_terminals(now, logins)));
        all.push(("screens", self.describe_screens(now)));
        all.push((
            "keyboard and mouse",
            match self.input {
                Evidence::Known(InputActivity {
                    last_used: Some(at),
                    ..
                }) => format!("last used {}", format_utc_time(*at)),
                Evidence::Known(InputActivity {
                    watched_since: watched,
                    ..
                }) => {
                    format!("not used since {}", format_utc_time(*watched))
                }
                Evidence::Unavailable(why) => format!("not available: {why}"),
            },
        ));
        all.push((
            "other programs",
            match self.external_load {
                Evidence::Known(cores) => format!("use {cores:.1} processors"),
                Evidence::Unavailable(why) => format!("not available: {why}"),
            },
        ));
        all.push(("owner's override", self.describe_overrides()));
        all
    }

    fn describe_terminals(&self, now: Micros, logins: &[Login]) -> String {
        let idle = |login: &Login| {
            let last = self.terminal_input.get(&login.line)?;
            Some(format!(
                "{} {} s",
                login.line,
                now.since(*last).0 / 1_000_000
            ))
        };
        let idle: Vec<String> = logins.iter().filter_map(idle).collect();
        let none = if logins.is_empty() {
            "no user is logged in"
        } else {
            "not available: no terminal can be examined"
        };
        if idle.is_empty() {
            none.into()
        } else {
            format!("without input: {}", idle.join(", "))
        }
    }

    fn describe_overrides(&self) -> String {
        let say = |spoken: &UserOverride| {
            let DeclaredPresence { state, until, .. } = spoken.owner_override.presence?;
            let said = if state == Presence::Here {
                "here"
            } else {
                "away"
            };
            Some(format!(
                "{} declared {said:?}, until {}",
                spoken.user,
                format_utc_time(until)
            ))
        };
        let words: Vec<String> = self.overrides.iter().filter_map(say).collect();
        if words.is_empty() {
            "none".into()
        } else {
            words.join("; ")
        }
    }
}

/// A verdict without the times that only [`OwnerDetector`] records.
enum Finding {
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

impl OwnerDetector {
    /// Returns the verdict at the time of day `now`.
    pub fn verdict(&mut self, now: Micros, signs: &OwnerSigns<'_>) -> OwnerAssessment {
        let all = merged_logins(signs.records, signs.sessions);
        self.expire_overrides(now, signs, &all);
        let valid = |s: &&UserOverride| {
            let said = s.owner_override.presence.as_ref();
            let over = |said: &DeclaredPresence| self.ended_overrides.contains(&(s.uid, said.at));
            signs.counts_as_owner(s)
                && said
                    .is_some_and(|said| now < said.until && !(said.ends_with_visit && over(said)))
        };
        let words: Vec<&UserOverride> = signs.overrides.iter().filter(valid).collect();
        let found = self.assess(now, signs, &all, &words);
        let (owner, confidence, why) = self.apply_finding(now, found);
        let sources = signs.describe_sources(now, &all);
        OwnerAssessment {
            verdict: owner,
            confidence,
            reason: why,
            logins: all,
            sources,
        }
    }

    /// Ends overrides: an override is ended by a later login, and by a logout.
    fn expire_overrides(&mut self, now: Micros, signs: &OwnerSigns<'_>, logins: &[Login]) {
        let visits: BTreeSet<(String, Micros)> =
            logins.iter().map(|l| (l.line.clone(), l.at)).collect();
        let left = self
            .visits
            .as_ref()
            .is_some_and(|before| before.iter().any(|visit| !visits.contains(visit)));
        let newest = logins.iter().map(|l| l.at).max();
        let said = |s: &UserOverride| Some((s.uid, s.owner_override.presence?));
        let known: Vec<(u32, DeclaredPresence)> = signs.overrides.iter().filter_map(said).collect();
        // Forgets ended overrides whose files do not exist any more.
        self.ended_overrides
            .retain(|(uid, at)| known.iter().any(|(u, said)| (u, said.at) == (uid, *at)));
        for (uid, said) in known {
            let came = newest.is_some_and(|at| at > said.at);
            if came || (left && now.since(said.at) > OVERRIDE_LOGOUT_AGE_MIN) {
                self.ended_overrides.insert((uid, said.at));
            }
        }
        self.visits = Some(visits);
    }

    fn assess(
        &mut self,
        now: Micros,
        signs: &OwnerSigns<'_>,
        all: &[Login],
        words: &[&UserOverride],
    ) -> Finding {
        if let Some(found) = declared_here(words) {
            return found;
        }
        let away: Vec<&UserOverride> = words
            .iter()
            .filter(|s| {
                s.owner_override
                    .presence
                    .is_some_and(|said| said.state == Presence::Away)
            })
            .copied()
            .collect();
        let is_hidden = |login: &Login| {
            away.iter()
                .any(|s| signs.covers_all_users(s) || s.user == login.user)
        };
        let logins: Vec<&Login> = all.iter().filter(|login| !is_hidden(login)).collect();
        if let Some(found) = active_login(now, signs, &logins) {
            return found;
        }
        if let (Some(spoken), true) = (away.first(), logins.is_empty()) {
            let until = spoken
                .owner_override
                .presence
                .map(|said| format_utc_time(said.until))
                .unwrap_or_default();
            let why = format!("{} declared \"away\", until {until}", spoken.user);
            return Finding::Absent {
                confidence: 100,
                why,
            };
        }
        if let Evidence::Known(InputActivity {
            last_used: Some(at),
            ..
        }) = signs.input
            && logins.is_empty()
            && now.since(*at) < GREETER_INPUT_WINDOW
        {
            let why = "keyboard or mouse are used without a login".to_string();
            return Finding::Present {
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
                login_phrase(logins[0]),
                format_utc_time(last)
            );
            let hours = u8::try_from(now.since(last).0 / 3_600_000_000).unwrap_or(u8::MAX);
            let confidence = 60 - hours.saturating_mul(5).min(40);
            return Finding::Maybe {
                since: Some(last),
                confidence,
                why: why + &other_logins_suffix(logins.len() - 1),
            };
        }
        self.assess_load(signs)
            .unwrap_or_else(|| absent_finding(signs))
    }

    /// Returns a finding if other programs use processors. The thresholds for high and low load
    /// differ, so that the finding does not alternate.
    fn assess_load(&mut self, signs: &OwnerSigns<'_>) -> Option<Finding> {
        if let Evidence::Known(cores) = signs.external_load {
            self.load_is_high = *cores
                >= if self.load_is_high {
                    EXTERNAL_LOAD_LOW
                } else {
                    EXTERNAL_LOAD_HIGH
                };
            if self.load_is_high {
                let halves = (cores * 2.0).round().max(1.0) / 2.0;
                let why = format!("other programs use about {halves:.1} processors");
                return Some(Finding::Maybe {
                    since: None,
                    confidence: 50,
                    why,
                });
            }
        }
        None
    }

    fn apply_finding(&mut self, now: Micros, found: Finding) -> (OwnerVerdict, u8, String) {
        match found {
            Finding::Present {
                since,
                confidence,
                why,
            } => {
                self.maybe_since = None;
                let seen = *self.present_since.get_or_insert(now);
                (
                    OwnerVerdict::Present {
                        since: since.unwrap_or(seen),
                        detected_at: seen,
                    },
                    confidence,
                    why,
                )
            }
            Finding::Maybe {
                since,
                confidence,
                why,
            } => {
                self.last_logout_at = self
                    .present_since
                    .take()
                    .map_or(self.last_logout_at, |_| Some(now));
                let first = *self.maybe_since.get_or_insert(now);
                (
                    OwnerVerdict::Maybe {
                        since: since.unwrap_or(first),
                    },
                    confidence,
                    why,
                )
            }
            Finding::Absent { confidence, why } => {
                let was_there =
                    self.present_since.take().is_some() | self.maybe_since.take().is_some();
                self.last_logout_at = if was_there {
                    Some(now)
                } else {
                    self.last_logout_at
                };
                (
                    OwnerVerdict::Absent {
                        since: self.last_logout_at,
                    },
                    confidence,
                    why,
                )
            }
        }
    }
}

/// Returns a finding if a user has declared to be here.
fn declared_here(words: &[&UserOverride]) -> Option<Finding> {
    let here = |s: &&UserOverride| {
        Some((
            s.user.clone(),
            s.owner_override
                .presence
                .filter(|said| said.state == Presence::Here)?,
        ))
    };
    let (user, DeclaredPresence { at, until, .. }) = words.iter().find_map(here)?;
    let why = format!(
        "{user} declared \"here\" at {}, until {}",
        format_utc_time(at),
        format_utc_time(until)
    );
    Some(Finding::Present {
        since: Some(at),
        confidence: 100,
        why,
    })
}

/// Returns the finding "present" if a user is logged in and not idle.
fn active_login(now: Micros, signs: &OwnerSigns<'_>, logins: &[&Login]) -> Option<Finding> {
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
        login_phrase(first),
        format_utc_time(first.at),
        other_logins_suffix(logins.len() - 1)
    );
    Some(Finding::Present {
        since: Some(first.at),
        confidence,
        why,
    })
}

fn absent_finding(signs: &OwnerSigns<'_>) -> Finding {
    if !signs.logins_unavailable() {
        let confidence = if matches!(signs.input, Evidence::Known(_)) {
            95
        } else {
            90
        };
        return Finding::Absent {
            confidence,
            why: "no user is logged in".into(),
        };
    }
    let path = signs.records_path.display();
    let why = match signs.records {
        LoginRecords::Unreadable(why) => {
            format!("logins are unknown: {path} cannot be read: {why}")
        }
        _ => format!("no user is logged in: {path} does not exist"),
    };
    Finding::Absent {
        confidence: 50,
        why,
    }
}

#[cfg(test)]
mod tests;
