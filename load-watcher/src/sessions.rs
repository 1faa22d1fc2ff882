//! Parser for login sessions of systemd-logind. The input is either a file of logind (one file in
//! `/run/systemd/sessions` for each session) or the D-Bus properties of a session. Pure; accepts
//! any text.
//!
//! Only sessions of persons are returned: class `user` with a terminal or a screen. A login screen,
//! a lock screen, a cron job or a command over ssh does not mean that a person uses the machine.

use sempa_proto::Micros;
use sempa_proto::load::Login;

/// Maximum number of bytes that are read from one session file.
pub const SESSION_BYTES_MAX: usize = 16 << 10;
/// Maximum number of session files that are read.
pub const SESSIONS_MAX: usize = 1024;

/// Use of a session's screen, as the desktop reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScreenUse {
    /// The desktop does not report the use of the screen.
    #[default]
    Unknown,
    InUse,
    /// The screen has been idle since this time of day.
    IdleSince(Micros),
}

/// A login session of a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// User, terminal and start of the session. For a session without a terminal, the field
    /// `terminal` contains the display or the name of the session.
    pub login: Login,
    /// True for a login over the network.
    pub is_remote: bool,
    /// True if the session has a screen. Input at a screen does not pass through the terminal of
    /// the session.
    pub has_screen: bool,
    /// Use of the screen; [`ScreenUse::Unknown`] if the session was read from a file.
    pub screen_use: ScreenUse,
}

/// Parses `text`, the content of the session file `name`. Returns `None` if the session does not
/// belong to a person.
pub fn parse_session_file(name: &str, text: &str) -> Option<Session> {
    session_from_values(name, |key| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        line.map(|value| value.trim().trim_matches('"').to_string())
    })
}

/// Creates a session from its values. `value` returns the value of a key, named as in a session
/// file. Returns `None` if the session does not belong to a person, is closing, or has neither a
/// terminal nor a screen.
pub(crate) fn session_from_values(
    name: &str,
    value: impl Fn(&str) -> Option<String>,
) -> Option<Session> {
    let value = |key: &str| {
        value(key)
            .map(|value| replace_control_chars(&value))
            .filter(|value| !value.is_empty())
    };
    let class = value("CLASS")?;
    let is_person = class == "user" || class.starts_with("user-early") || class == "user-light";
    let is_open = value("STATE").is_none_or(|state| state != "closing");
    let session_type = value("TYPE");
    let has_screen = matches!(
        session_type.as_deref(),
        Some("x11" | "wayland" | "mir" | "web")
    );
    let has_terminal_or_screen = has_screen || session_type.as_deref() == Some("tty");
    if !is_person || !is_open || !has_terminal_or_screen {
        return None;
    }
    let user_name = value("USER").or_else(|| Some(format!("user {}", value("UID")?)))?;
    let terminal = value("TTY")
        .or_else(|| value("DISPLAY"))
        .unwrap_or_else(|| format!("session {name}"));
    let terminal = terminal
        .strip_prefix("/dev/")
        .map_or(terminal.clone(), str::to_string);
    let started_at = Micros(
        value("REALTIME")
            .and_then(|text| text.parse().ok())
            .unwrap_or(0),
    );
    let is_remote = value("REMOTE").is_some_and(|flag| flag == "1");
    let origin = value("REMOTE_HOST")
        .filter(|_| is_remote)
        .unwrap_or_default();
    Some(Session {
        login: Login {
            user_name,
            terminal,
            origin,
            at: started_at,
        },
        is_remote,
        has_screen,
        screen_use: ScreenUse::Unknown,
    })
}

/// Sorts sessions by start time, then by terminal line.
pub(crate) fn sort_by_start(mut sessions: Vec<Session>) -> Vec<Session> {
    sessions.sort_by(|a, b| (a.login.at, &a.login.terminal).cmp(&(b.login.at, &b.login.terminal)));
    sessions
}

/// Replaces the control characters of a value, because they could manipulate the terminal on which
/// the value is printed.
fn replace_control_chars(value: &str) -> String {
    value
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

/// Merges login records and sessions into a list of logins, earliest first. A session whose
/// terminal has a login record is omitted, because the session and the record describe the same
/// login.
pub fn merge_logins(records: &[Login], sessions: &[Session]) -> Vec<Login> {
    let mut logins = records.to_vec();
    let unrecorded_logins = sessions
        .iter()
        .map(|s| &s.login)
        .filter(|l| records.iter().all(|r| r.terminal != l.terminal));
    logins.extend(unrecorded_logins.cloned());
    logins.sort_by(|a, b| (a.at, &a.terminal).cmp(&(b.at, &b.terminal)));
    logins
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DESKTOP_SESSION: &str = "# This is private data. Do not parse.\nUID=1000\nUSER=alice\nACTIVE=1\nSTATE=active\nREMOTE=0\n\
        TYPE=wayland\nCLASS=user\nSEAT=seat0\nVTNR=2\nTTY=tty2\nLEADER=1234\nREALTIME=1700000000000000\n";

    fn parse_with_value(key: &str, value: &str) -> Option<Session> {
        let lines: Vec<String> = DESKTOP_SESSION
            .lines()
            .filter(|l| !l.starts_with(&format!("{key}=")))
            .map(str::to_string)
            .collect();
        parse_session_file("3", &format!("{}\n{key}={value}\n", lines.join("\n")))
    }

    #[test]
    fn session_file_gives_user_terminal_and_start() {
        let Session {
            login,
            is_remote,
            has_screen,
            ..
        } = parse_session_file("3", DESKTOP_SESSION).expect("somebody");
        assert!(
            has_screen
                && !parse_with_value("TYPE", "tty")
                    .expect("somebody")
                    .has_screen
        );
        assert_eq!(
            (
                login.user_name.as_str(),
                login.terminal.as_str(),
                login.origin.as_str()
            ),
            ("alice", "tty2", "")
        );
        assert_eq!(
            (login.at, is_remote),
            (Micros(1_700_000_000_000_000), false)
        );
        let remote_session = parse_session_file(
            "4",
            &format!(
                "{}REMOTE_HOST=10.0.0.9\n",
                DESKTOP_SESSION.replace("REMOTE=0", "REMOTE=1")
            ),
        )
        .expect("one");
        assert_eq!(
            (
                remote_session.login.origin.as_str(),
                remote_session.is_remote
            ),
            ("10.0.0.9", true)
        );
        assert_eq!(
            parse_with_value("TTY", "")
                .expect("somebody")
                .login
                .terminal,
            "session 3"
        );
        assert_eq!(
            parse_with_value("TTY", "/dev/pts/4")
                .expect("somebody")
                .login
                .terminal,
            "pts/4"
        );
    }

    /// Greeters, background jobs and closing sessions are not sessions of persons.
    #[test]
    fn greeters_jobs_and_closing_sessions_are_ignored() {
        for (key, value) in [
            ("CLASS", "greeter"),
            ("CLASS", "lock-screen"),
            ("CLASS", "background"),
            ("CLASS", "manager"),
            ("STATE", "closing"),
            ("TYPE", "unspecified"),
        ] {
            assert_eq!(parse_with_value(key, value), None, "{key}={value}");
        }
    }

    #[test]
    fn session_with_login_record_is_merged() {
        let record = Login {
            user_name: "alice".into(),
            terminal: "tty2".into(),
            origin: String::new(),
            at: Micros(5),
        };
        let session = parse_session_file("3", DESKTOP_SESSION).expect("somebody");
        assert_eq!(
            merge_logins(
                std::slice::from_ref(&record),
                std::slice::from_ref(&session)
            ),
            *std::slice::from_ref(&record)
        );
        let unrelated_login = Login {
            terminal: "pts/0".into(),
            ..record
        };
        assert_eq!(
            merge_logins(
                std::slice::from_ref(&unrelated_login),
                std::slice::from_ref(&session)
            ),
            [unrelated_login, session.login]
        );
    }

    proptest! {
        #[test]
        fn any_text_is_accepted(text in "(?s).{0,200}") {
            let _ = parse_session_file("1", &text);
            let _ = parse_session_file("1", &format!("{DESKTOP_SESSION}{text}"));
        }
    }
}
