//! Derives from all signs whether the owner of this host is absent, possibly present, or present,
//! with a confidence and a reason. Pure.
//!
//! Each source of signs is available, or unavailable with a reason. An unavailable source is no
//! evidence for or against the presence of an owner. An override "away" hides the logins of its
//! user; if its user is an owner of the whole machine, it hides all logins.
//! [`OwnerDetector::derive_verdict`] checks the signs in this order; the first that applies
//! determines the verdict:
//!
//! 1. an owner's override "here": present;
//! 2. a visible login with recent input, or a visible login whose input no source can observe:
//!    present;
//! 3. an override "away", if no login is visible: absent;
//! 4. recent input of keyboard or mouse, if no login is visible: present;
//! 5. a visible login without recent input: possibly present;
//! 6. high external load: possibly present;
//! 7. otherwise absent.
//!
//! Without a resource manager, a login of the virtual machine's own user is not visible, and
//! explains input at the machine.

use crate::host_policy::is_at_machine;
use crate::owner_override::{DeclaredPresence, OwnerOverride, Presence};
use crate::sessions::{ScreenUse, Session, merge_logins};
use sempa_proto::Micros;
use sempa_proto::load::{Login, OwnerVerdict};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Time after input at keyboard or mouse during which a person without a login counts as present,
/// for example a person at a login screen.
pub const GREETER_INPUT_WINDOW: Micros = Micros::from_secs(300);
/// External load, in processors, from which the owner is possibly present.
pub const HIGH_EXTERNAL_PROCESSORS: f32 = 0.5;
/// External load, in processors, below which a high load counts as low again.
pub const LOW_EXTERNAL_PROCESSORS: f32 = 0.25;
/// Age that an override must exceed to be ended by a logout. Because of this minimum, users may set
/// an override and then log out.
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
    /// The source is unavailable; contains the reason as text.
    Unavailable(String),
}

/// Observed use of keyboard and mouse, also without a login.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputActivity {
    /// Time at which the observation started.
    pub watched_since: Micros,
    /// Time of the last observed use; `None` if no use has been observed since `watched_since`.
    pub last_used: Option<Micros>,
}

/// The override of one user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserOverride {
    pub uid: u32,
    pub user: String,
    pub owner_override: OwnerOverride,
}

/// All signs of the owner's presence at one moment. Each time is a time of day.
#[derive(Clone, Debug)]
pub struct OwnerSigns<'a> {
    /// Path of the file with the login records.
    pub records_path: &'a Path,
    pub login_records: &'a LoginRecords,
    /// Sessions that systemd-logind knows.
    pub sessions: &'a Evidence<Vec<Session>>,
    /// The reason why logind cannot be queried over D-Bus; `sessions` was then read from logind's
    /// files. `None` if logind has answered.
    pub logind_error: Option<&'a str>,
    /// Time of the last input at the terminal of each login, by terminal line. A terminal that
    /// cannot be examined is missing.
    pub terminal_input: &'a BTreeMap<String, Micros>,
    pub input_activity: &'a Evidence<InputActivity>,
    /// Mean number of processors that programs outside the virtual machine use.
    pub external_load: &'a Evidence<f32>,
    /// Overrides of all users.
    pub overrides: &'a [UserOverride],
    /// Names of the users who are owners in addition to root; `None` if all users are owners.
    pub owners: Option<&'a [String]>,
    /// Time without input after which the user of a login is only possibly present.
    pub idle_after: Micros,
    /// Name of the user of the virtual machine, if no resource manager runs. The tasks are this
    /// user's own programs, and could not leave, so the user's logins are no sign of an owner.
    /// `None` if these logins count as those of all users.
    pub own_user: Option<&'a str>,
}

/// The owner verdict with its confidence, its reason and the state of its sources.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OwnerAssessment {
    pub verdict: OwnerVerdict,
    /// Confidence in the verdict, in percent.
    pub confidence: u8,
    /// The reason for the verdict, in one sentence.
    pub reason: String,
    /// The logins on which the verdict is based.
    pub logins: Vec<Login>,
    /// Name of each source, and a description of its state.
    pub sources: Vec<(String, String)>,
}

/// Derives owner verdicts. Records since when the owner is present or possibly present, and when
/// the owner's last visit ended.
#[derive(Debug, Default)]
pub struct OwnerDetector {
    present_since: Option<Micros>,
    maybe_since: Option<Micros>,
    last_logout_at: Option<Micros>,
    /// True if the external load was high and has not been low since.
    load_is_high: bool,
    /// Terminal line and login time of each login at the last assessment; `None` before the first
    /// assessment.
    previous_visits: Option<BTreeSet<(String, Micros)>>,
    /// Overrides that were ended by a login or logout: uid and time of each declaration.
    ended_overrides: BTreeSet<(u32, Micros)>,
}

/// Formats a time of day as UTC, as in the reasons of verdicts.
pub fn format_utc_time(time_of_day: Micros) -> String {
    let seconds = time_of_day.0 / 1_000_000 % 86_400;
    format!(
        "{:02}:{:02}:{:02} UTC",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60
    )
}

/// Describes a login as a phrase, for example "alice is logged in on pts/3 from h9".
fn login_phrase(login: &Login) -> String {
    let origin_suffix = if login.origin.is_empty() {
        String::new()
    } else {
        format!(" from {}", login.origin)
    };
    format!(
        "{} is logged in on {}{origin_suffix}",
        login.user_name, login.terminal
    )
}

fn other_logins_suffix(other_count: usize) -> String {
    if other_count > 0 {
        format!(", and {other_count} more")
    } else {
        String::new()
    }
}

/// Returns the users who are logged in according to the available sources, earliest first.
pub fn available_logins(records: &LoginRecords, sessions: &Evidence<Vec<Session>>) -> Vec<Login> {
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
    /// Returns the time of the last input of the user of a login, or the time of the login if it is
    /// later; `None` if no source can observe the input. Input at a screen does not pass through
    /// the terminal of its session.
    fn last_input(&self, now: Micros, login: &Login) -> Option<Micros> {
        let Login {
            terminal: terminal_line,
            origin,
            ..
        } = login;
        // In the login record of a screen, the field `origin` contains the display or the terminal.
        let is_screen_login =
            terminal_line.starts_with(':') || origin.starts_with(':') || origin == terminal_line;
        let input_device_use = match self.input_activity {
            Evidence::Known(input_device_use) if origin.is_empty() || is_screen_login => Some(
                input_device_use
                    .last_used
                    .unwrap_or(input_device_use.watched_since),
            ),
            _ => None,
        };
        let belongs_to_login = |s: &&Session| {
            s.login.terminal == *terminal_line
                || (is_screen_login && s.login.user_name == login.user_name)
        };
        let session = self.screen_sessions().find(belongs_to_login);
        let terminal_input = self
            .terminal_input
            .get(terminal_line)
            .copied()
            .filter(|_| !is_screen_login && session.is_none());
        let desktop_input = match session.map(|s| s.screen_use) {
            // Some desktops never report that they are idle. Keyboard interrupts are more reliable,
            // if any were ever observed.
            Some(ScreenUse::InUse)
                if !matches!(
                    self.input_activity,
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
        let newest_input = terminal_input
            .into_iter()
            .chain(input_device_use)
            .chain(desktop_input)
            .max()?;
        Some(newest_input.max(login.at))
    }

    /// Returns the sessions with a screen.
    fn screen_sessions(&self) -> impl Iterator<Item = &Session> {
        let known_sessions = match self.sessions {
            Evidence::Known(sessions) => sessions.as_slice(),
            Evidence::Unavailable(_) => &[],
        };
        known_sessions.iter().filter(|s| s.has_screen)
    }

    /// Describes what desktops report about their screens.
    fn describe_screens(&self, now: Micros) -> String {
        if let Some(error) = self.logind_error {
            return format!("not available: {error}");
        }
        let describe_screen = |s: &Session| match s.screen_use {
            ScreenUse::Unknown => format!("{} is not reported", s.login.terminal),
            ScreenUse::InUse => format!("{} in use", s.login.terminal),
            ScreenUse::IdleSince(at) => format!(
                "{} without input {} s",
                s.login.terminal,
                now.since(at).0 / 1_000_000
            ),
        };
        let descriptions: Vec<String> = self.screen_sessions().map(describe_screen).collect();
        if descriptions.is_empty() {
            "no session has a screen".into()
        } else {
            descriptions.join(", ")
        }
    }

    fn counts_as_owner(&self, user_override: &UserOverride) -> bool {
        let is_named = |owners: &[String]| owners.contains(&user_override.user);
        user_override.uid == 0 || self.owners.is_none_or(is_named)
    }

    /// True if this user's override applies to the logins of all users, not only to the user's own
    /// logins.
    fn covers_all_users(&self, user_override: &UserOverride) -> bool {
        user_override.uid == 0 || self.owners.is_some()
    }

    /// True if no source can list the users who are logged in.
    fn logins_unavailable(&self) -> bool {
        !matches!(self.login_records, LoginRecords::Logins(_))
            && matches!(self.sessions, Evidence::Unavailable(_))
    }

    fn describe_sources(&self, now: Micros, logins: &[Login]) -> Vec<(&'static str, String)> {
        let count_phrase = |n: usize| {
            if n == 1 {
                "1 login".to_string()
            } else {
                format!("{n} logins")
            }
        };
        let mut sources = Vec::new();
        sources.push((
            "logins",
            match self.login_records {
                LoginRecords::Logins(list) => count_phrase(list.len()),
                LoginRecords::Missing => {
                    format!(
                        "not available: {} does not exist",
                        self.records_path.display()
                    )
                }
                LoginRecords::Unreadable(reason) => format!(
                    "not available: {} cannot be read: {reason}",
                    self.records_path.display()
                ),
            },
        ));
        sources.push((
            "sessions",
            match self.sessions {
                Evidence::Known(list) => format!("{} sessions of people", list.len()),
                Evidence::Unavailable(reason) => format!("not available: {reason}"),
            },
        ));
        sources.push(("terminals", self.describe_terminals(now, logins)));
        sources.push(("screens", self.describe_screens(now)));
        sources.push((
            "keyboard and mouse",
            match self.input_activity {
                Evidence::Known(InputActivity {
                    last_used: Some(at),
                    ..
                }) => format!("last used {}", format_utc_time(*at)),
                Evidence::Known(InputActivity { watched_since, .. }) => {
                    format!("not used since {}", format_utc_time(*watched_since))
                }
                Evidence::Unavailable(reason) => format!("not available: {reason}"),
            },
        ));
        sources.push((
            "other programs",
            match self.external_load {
                Evidence::Known(cores) => format!("use {cores:.1} processors"),
                Evidence::Unavailable(reason) => format!("not available: {reason}"),
            },
        ));
        sources.push(("owner's override", self.describe_overrides()));
        sources
    }

    fn describe_terminals(&self, now: Micros, logins: &[Login]) -> String {
        let idle_texts = |login: &Login| {
            let last_input = self.terminal_input.get(&login.terminal)?;
            Some(format!(
                "{} {} s",
                login.terminal,
                now.since(*last_input).0 / 1_000_000
            ))
        };
        let idle_texts: Vec<String> = logins.iter().filter_map(idle_texts).collect();
        let empty_text = if logins.is_empty() {
            "no user is logged in"
        } else {
            "not available: no terminal can be examined"
        };
        if idle_texts.is_empty() {
            empty_text.into()
        } else {
            format!("without input: {}", idle_texts.join(", "))
        }
    }

    fn describe_overrides(&self) -> String {
        let describe_override = |user_override: &UserOverride| {
            let DeclaredPresence {
                state, expires_at, ..
            } = user_override.owner_override.presence?;
            let declared_state = if state == Presence::Here {
                "here"
            } else {
                "away"
            };
            Some(format!(
                "{} declared {declared_state:?}, until {}",
                user_override.user,
                format_utc_time(expires_at)
            ))
        };
        let descriptions: Vec<String> = self
            .overrides
            .iter()
            .filter_map(describe_override)
            .collect();
        if descriptions.is_empty() {
            "none".into()
        } else {
            descriptions.join("; ")
        }
    }
}

/// A verdict before [`OwnerDetector`] adds the times that it has recorded.
enum Finding {
    Present {
        since: Option<Micros>,
        confidence: u8,
        reason: String,
    },
    Maybe {
        since: Option<Micros>,
        confidence: u8,
        reason: String,
    },
    Absent {
        confidence: u8,
        reason: String,
    },
}

impl OwnerDetector {
    /// Returns the verdict at the time of day `now`, with its confidence, its reason and a
    /// description of each source. Records the ended overrides and the times for the next verdict.
    pub fn derive_verdict(&mut self, now: Micros, signs: &OwnerSigns<'_>) -> OwnerAssessment {
        let logins = available_logins(signs.login_records, signs.sessions);
        self.record_ended_overrides(now, signs, &logins);
        let override_is_valid = |s: &&UserOverride| {
            let presence = s.owner_override.presence.as_ref();
            let has_ended = |presence: &DeclaredPresence| {
                self.ended_overrides
                    .contains(&(s.uid, presence.declared_at))
            };
            signs.counts_as_owner(s)
                && presence.is_some_and(|presence| {
                    now < presence.expires_at && !(presence.ends_with_visit && has_ended(presence))
                })
        };
        let valid_overrides: Vec<&UserOverride> =
            signs.overrides.iter().filter(override_is_valid).collect();
        let finding = self.derive_finding(now, signs, &logins, &valid_overrides);
        let (owner_verdict, confidence, verdict_reason) = self.apply_finding(now, finding);
        let sources = signs.describe_sources(now, &logins);
        let sources = sources
            .into_iter()
            .map(|(name, text)| (name.to_string(), text))
            .collect();
        OwnerAssessment {
            verdict: owner_verdict,
            confidence,
            reason: verdict_reason,
            logins,
            sources,
        }
    }

    /// Records which overrides have ended. A login after the declaration ends an override, and so
    /// does a logout more than [`OVERRIDE_LOGOUT_AGE_MIN`] after the declaration.
    fn record_ended_overrides(&mut self, now: Micros, signs: &OwnerSigns<'_>, logins: &[Login]) {
        let visits: BTreeSet<(String, Micros)> =
            logins.iter().map(|l| (l.terminal.clone(), l.at)).collect();
        let has_logout = self
            .previous_visits
            .as_ref()
            .is_some_and(|previous_visits| {
                previous_visits.iter().any(|visit| !visits.contains(visit))
            });
        let newest_login_at = logins.iter().map(|l| l.at).max();
        let presence = |s: &UserOverride| Some((s.uid, s.owner_override.presence?));
        let declarations: Vec<(u32, DeclaredPresence)> =
            signs.overrides.iter().filter_map(presence).collect();
        // Ended overrides whose files do not exist any more are forgotten.
        self.ended_overrides.retain(|(uid, at)| {
            declarations
                .iter()
                .any(|(u, presence)| (u, presence.declared_at) == (uid, *at))
        });
        for (uid, presence) in declarations {
            let has_login = newest_login_at.is_some_and(|at| at > presence.declared_at);
            if has_login
                || (has_logout && now.since(presence.declared_at) > OVERRIDE_LOGOUT_AGE_MIN)
            {
                self.ended_overrides.insert((uid, presence.declared_at));
            }
        }
        self.previous_visits = Some(visits);
    }

    fn derive_finding(
        &mut self,
        now: Micros,
        signs: &OwnerSigns<'_>,
        all_logins: &[Login],
        valid_overrides: &[&UserOverride],
    ) -> Finding {
        if let Some(finding) = declared_here_finding(valid_overrides) {
            return finding;
        }
        let away_overrides: Vec<&UserOverride> = valid_overrides
            .iter()
            .filter(|s| {
                s.owner_override
                    .presence
                    .is_some_and(|presence| presence.state == Presence::Away)
            })
            .copied()
            .collect();
        let is_hidden = |login: &Login| {
            away_overrides
                .iter()
                .any(|s| signs.covers_all_users(s) || s.user == login.user_name)
        };
        let is_own = |login: &Login| signs.own_user == Some(login.user_name.as_str());
        let visible_logins: Vec<&Login> = all_logins
            .iter()
            .filter(|login| !is_hidden(login) && !is_own(login))
            .collect();
        // The user of the virtual machine at the machine uses its keyboard.
        let explains_input = |login: &Login| is_own(login) && is_at_machine(login);
        if let Some(finding) = active_login_finding(now, signs, &visible_logins) {
            return finding;
        }
        if let (Some(away_override), true) = (away_overrides.first(), visible_logins.is_empty()) {
            let expiry_text = away_override
                .owner_override
                .presence
                .map(|presence| format_utc_time(presence.expires_at))
                .unwrap_or_default();
            let reason = format!(
                "{} declared \"away\", until {expiry_text}",
                away_override.user
            );
            return Finding::Absent {
                confidence: 100,
                reason,
            };
        }
        if let Evidence::Known(InputActivity {
            last_used: Some(at),
            ..
        }) = signs.input_activity
            && visible_logins.is_empty()
            && !all_logins.iter().any(explains_input)
            && now.since(*at) < GREETER_INPUT_WINDOW
        {
            let reason = "keyboard or mouse are used without a login".to_string();
            return Finding::Present {
                since: None,
                confidence: 85,
                reason,
            };
        }
        if let Some(last_input_at) = visible_logins
            .iter()
            .filter_map(|login| signs.last_input(now, login))
            .max()
        {
            let reason = format!(
                "{}, without input since {}",
                login_phrase(visible_logins[0]),
                format_utc_time(last_input_at)
            );
            let idle_hours =
                u8::try_from(now.since(last_input_at).0 / 3_600_000_000).unwrap_or(u8::MAX);
            let confidence = 60 - idle_hours.saturating_mul(5).min(40);
            return Finding::Maybe {
                since: Some(last_input_at),
                confidence,
                reason: reason + &other_logins_suffix(visible_logins.len() - 1),
            };
        }
        let has_own_login = all_logins.iter().any(is_own);
        self.assess_load(signs)
            .unwrap_or_else(|| absent_finding(signs, has_own_login))
    }

    /// Returns the finding "possibly present" while the external load is high. The load is high
    /// from [`HIGH_EXTERNAL_PROCESSORS`] on, until it falls below [`LOW_EXTERNAL_PROCESSORS`], so
    /// that small changes do not change the finding.
    fn assess_load(&mut self, signs: &OwnerSigns<'_>) -> Option<Finding> {
        if let Evidence::Known(processors) = signs.external_load {
            self.load_is_high = *processors
                >= if self.load_is_high {
                    LOW_EXTERNAL_PROCESSORS
                } else {
                    HIGH_EXTERNAL_PROCESSORS
                };
            if self.load_is_high {
                let rounded_processors = (processors * 2.0).round().max(1.0) / 2.0;
                let reason = format!("other programs use about {rounded_processors:.1} processors");
                return Some(Finding::Maybe {
                    since: None,
                    confidence: 50,
                    reason,
                });
            }
        }
        None
    }

    fn apply_finding(&mut self, now: Micros, finding: Finding) -> (OwnerVerdict, u8, String) {
        match finding {
            Finding::Present {
                since,
                confidence,
                reason,
            } => {
                self.maybe_since = None;
                let first_seen_at = *self.present_since.get_or_insert(now);
                (
                    OwnerVerdict::Present {
                        since: since.unwrap_or(first_seen_at),
                        detected_at: first_seen_at,
                    },
                    confidence,
                    reason,
                )
            }
            Finding::Maybe {
                since,
                confidence,
                reason,
            } => {
                self.last_logout_at = self
                    .present_since
                    .take()
                    .map_or(self.last_logout_at, |_| Some(now));
                let maybe_since = *self.maybe_since.get_or_insert(now);
                (
                    OwnerVerdict::Uncertain {
                        since: since.unwrap_or(maybe_since),
                    },
                    confidence,
                    reason,
                )
            }
            Finding::Absent { confidence, reason } => {
                let was_maybe_present =
                    self.present_since.take().is_some() | self.maybe_since.take().is_some();
                self.last_logout_at = if was_maybe_present {
                    Some(now)
                } else {
                    self.last_logout_at
                };
                (
                    OwnerVerdict::Absent {
                        since: self.last_logout_at,
                    },
                    confidence,
                    reason,
                )
            }
        }
    }
}

/// Returns the finding "present" if one of the overrides `valid_overrides` declares "here".
fn declared_here_finding(valid_overrides: &[&UserOverride]) -> Option<Finding> {
    let here_declaration = |s: &&UserOverride| {
        Some((
            s.user.clone(),
            s.owner_override
                .presence
                .filter(|presence| presence.state == Presence::Here)?,
        ))
    };
    let (
        user,
        DeclaredPresence {
            declared_at,
            expires_at,
            ..
        },
    ) = valid_overrides.iter().find_map(here_declaration)?;
    let reason = format!(
        "{user} declared \"here\" at {}, until {}",
        format_utc_time(declared_at),
        format_utc_time(expires_at)
    );
    Some(Finding::Present {
        since: Some(declared_at),
        confidence: 100,
        reason,
    })
}

/// Returns the finding "present" if one of the logins has recent input, or if no source can observe
/// the input of one of the logins.
fn active_login_finding(now: Micros, signs: &OwnerSigns<'_>, logins: &[&Login]) -> Option<Finding> {
    let idle_time = |login: &Login| signs.last_input(now, login).map(|at| now.since(at));
    let login_is_active =
        |login: &&&Login| idle_time(login).is_none_or(|duration| duration < signs.idle_after);
    let first_active_login = logins.iter().find(login_is_active)?;
    let confidence = match idle_time(first_active_login) {
        None => 90,
        Some(duration) if duration < Micros::from_secs(60) => 99,
        Some(_) => 95,
    };
    let reason = format!(
        "{} since {}{}",
        login_phrase(first_active_login),
        format_utc_time(first_active_login.at),
        other_logins_suffix(logins.len() - 1)
    );
    Some(Finding::Present {
        since: Some(first_active_login.at),
        confidence,
        reason,
    })
}

/// Returns the finding "absent". `has_own_login` is true if the user of the virtual machine is
/// logged in, which does not count.
fn absent_finding(signs: &OwnerSigns<'_>, has_own_login: bool) -> Finding {
    if !signs.logins_unavailable() {
        let confidence = if matches!(signs.input_activity, Evidence::Known(_)) {
            95
        } else {
            90
        };
        return Finding::Absent {
            confidence,
            reason: match signs.own_user.filter(|_| has_own_login) {
                Some(user) => format!("only {user} is logged in, whose virtual machine this is"),
                None => "no user is logged in".into(),
            },
        };
    }
    let path = signs.records_path.display();
    let reason = match signs.login_records {
        LoginRecords::Unreadable(reason) => {
            format!("logins are unknown: {path} cannot be read: {reason}")
        }
        _ => format!("no user is logged in: {path} does not exist"),
    };
    Finding::Absent {
        confidence: 50,
        reason,
    }
}

#[cfg(test)]
mod tests;
