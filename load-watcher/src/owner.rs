//! What the login records say about the owner: present while anybody is logged in. Pure.

use sempa_proto::Micros;
use sempa_proto::load::{Login, OwnerVerdict};
use std::path::Path;

/// What reading the login records gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Records {
    /// Who is logged in, earliest first.
    Logins(Vec<Login>),
    /// There is no such file.
    Missing,
    /// It cannot be read; the system's words.
    Unreadable(String),
}

/// Remembers since when it is as it is.
#[derive(Debug, Default)]
pub struct Sense {
    seen: Option<Micros>,
    left: Option<Micros>,
}

/// A time of day (UTC) for a sentence.
fn clock(at: Micros) -> String {
    let seconds = at.0 / 1_000_000 % 86_400;
    format!("{:02}:{:02}:{:02} UTC", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

impl Sense {
    /// The verdict and its sentence, after the records at `path` were read at `now` (time of day).
    pub fn verdict(&mut self, now: Micros, path: &Path, records: &Records) -> (OwnerVerdict, String) {
        if let Records::Logins(logins) = records
            && let Some(first) = logins.first()
        {
            let seen = *self.seen.get_or_insert(now);
            let from = if first.from.is_empty() { String::new() } else { format!(" from {}", first.from) };
            let others = logins.len() - 1;
            let more = if others > 0 { format!(", and {others} more") } else { String::new() };
            let why = format!("{} is logged in on {}{from} since {}{more}", first.user, first.line, clock(first.at));
            return (OwnerVerdict::Present { since: first.at, seen }, why);
        }
        if self.seen.take().is_some() {
            self.left = Some(now);
        }
        let why = match records {
            Records::Logins(_) => "nobody is logged in".to_string(),
            Records::Missing => format!("nobody is logged in: {} does not exist", path.display()),
            Records::Unreadable(why) => format!("logins are unknown: {} cannot be read: {why}", path.display()),
        };
        (OwnerVerdict::Absent { since: self.left }, why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn login(user: &str, at: u64) -> Login {
        Login { user: user.into(), line: "pts/3".into(), from: "h9".into(), at: Micros::from_secs(at) }
    }

    #[test]
    fn the_verdict_keeps_when_the_visit_began_and_ended() {
        let (mut sense, path) = (Sense::default(), Path::new("/run/utmp"));
        let mut at = |now: u64, records: Records| sense.verdict(Micros::from_secs(now), path, &records);
        let nobody = || Records::Logins(Vec::new());
        assert_eq!(at(1, nobody()), (OwnerVerdict::Absent { since: None }, "nobody is logged in".into()));
        let (first, why) = at(100_001, Records::Logins(vec![login("alice", 100_000)]));
        let present = OwnerVerdict::Present { since: Micros::from_secs(100_000), seen: Micros::from_secs(100_001) };
        assert_eq!(first, present);
        assert_eq!(why, "alice is logged in on pts/3 from h9 since 03:46:40 UTC");
        let (second, why) = at(100_050, Records::Logins(vec![login("alice", 100_000), login("bob", 100_049)]));
        assert_eq!(second, present);
        assert!(why.ends_with(", and 1 more"));
        assert_eq!(at(100_060, nobody()).0, OwnerVerdict::Absent { since: Some(Micros::from_secs(100_060)) });
        assert_eq!(at(100_070, nobody()).0, OwnerVerdict::Absent { since: Some(Micros::from_secs(100_060)) });
    }

    #[test]
    fn a_missing_file_is_nobody_and_says_so() {
        let (verdict, why) = Sense::default().verdict(Micros(1), Path::new("/x/utmp"), &Records::Missing);
        assert_eq!(verdict, OwnerVerdict::Absent { since: None });
        assert_eq!(why, "nobody is logged in: /x/utmp does not exist");
        let denied = Records::Unreadable("permission denied".into());
        let (_, why) = Sense::default().verdict(Micros(1), Path::new("/x/utmp"), &denied);
        assert_eq!(why, "logins are unknown: /x/utmp cannot be read: permission denied");
    }
}
