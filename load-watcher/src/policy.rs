//! Policies about guests: TOML files of the owner, the administrator and the user of the virtual
//! machine, and the rules for merging them. Pure.
//!
//! - For each setting, the owner's value has priority over the administrator's, and the
//!   administrator's over the user's ([`MergedPolicy::fill_from`]).
//! - Several owners have equal rights, so the most restrictive value of each setting is used
//!   ([`MergedPolicy::restrict_by`]).
//! - A malformed text is refused with the line of its error.

use crate::hours::WeeklyHours;
use sempa_proto::owner::EvictionMode;
use sempa_proto::text::{line_number, split_memory_size};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use thiserror::Error;
use toml::Spanned;

/// Maximum size of a policy file in bytes.
pub const POLICY_BYTES_MAX: usize = 64 << 10;
/// Maximum number of entries of one list in a policy file.
pub const LIST_ENTRIES_MAX: usize = 256;
/// Maximum number of entries of a list that was merged from several owners' lists.
const UNION_ENTRIES_MAX: usize = 4 * LIST_ENTRIES_MAX;
/// Maximum value of `leave_after`, in seconds: a day.
pub const LEAVE_AFTER_S_MAX: u64 = 86_400;
/// Default of `idle_after_min`: minutes without input after which a login counts as idle.
pub const DEFAULT_IDLE_AFTER_MIN: u32 = 15;

/// An amount of memory in bytes. In a policy file it is a number of bytes, or a text with the
/// suffix K, M, G or T.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "NumberOrText")]
pub struct MemorySize(pub u64);

/// Time limit for guests to be evicted after they must stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "NumberOrText")]
pub enum LeaveAfter {
    Seconds(u64),
    /// Guests stay paused and are never evicted.
    Never,
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected a number from 0 on or a text in quotes"
)]
enum NumberOrText {
    Number(u64),
    Text(String),
}

/// A text that is not an amount of memory.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is not an amount of memory; examples: \"4G\" or \"512M\"")]
pub struct InvalidMemorySize(String);

/// A value that is not a time limit for guests to leave.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InvalidLeaveAfter {
    #[error("{0} seconds are more than a day")]
    TooLong(u64),
    #[error("{0:?} is neither a number of seconds nor \"never\"")]
    NotSeconds(String),
}

impl FromStr for MemorySize {
    type Err = InvalidMemorySize;

    fn from_str(text: &str) -> Result<MemorySize, InvalidMemorySize> {
        let wrong = || InvalidMemorySize(text.to_string());
        let (digits, shift) = split_memory_size(text).ok_or_else(wrong)?;
        let number: u64 = digits.parse().map_err(|_| wrong())?;
        number
            .checked_mul(1 << shift)
            .map(MemorySize)
            .ok_or_else(wrong)
    }
}

impl TryFrom<NumberOrText> for MemorySize {
    type Error = InvalidMemorySize;

    fn try_from(value: NumberOrText) -> Result<MemorySize, InvalidMemorySize> {
        match value {
            NumberOrText::Number(bytes) => Ok(MemorySize(bytes)),
            NumberOrText::Text(text) => text.parse(),
        }
    }
}

impl fmt::Display for MemorySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
        let whole = units
            .iter()
            .find(|(shift, _)| self.0 > 0 && self.0.trailing_zeros() >= *shift);
        match whole {
            Some((shift, unit)) => write!(f, "{}{unit}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

impl TryFrom<NumberOrText> for LeaveAfter {
    type Error = InvalidLeaveAfter;

    fn try_from(value: NumberOrText) -> Result<LeaveAfter, InvalidLeaveAfter> {
        match value {
            NumberOrText::Number(seconds) if seconds <= LEAVE_AFTER_S_MAX => {
                Ok(LeaveAfter::Seconds(seconds))
            }
            NumberOrText::Number(seconds) => Err(InvalidLeaveAfter::TooLong(seconds)),
            NumberOrText::Text(text) if text == "never" => Ok(LeaveAfter::Never),
            NumberOrText::Text(text) => Err(InvalidLeaveAfter::NotSeconds(text)),
        }
    }
}

impl fmt::Display for LeaveAfter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LeaveAfter::Seconds(seconds) => write!(f, "{seconds} s"),
            LeaveAfter::Never => f.write_str("never"),
        }
    }
}

/// Programs and users that are never admitted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Blocked {
    /// Name or path patterns of programs, in which `*` stands for any characters.
    pub programs: Option<Vec<String>>,
    pub users: Option<Vec<BlockedUser>>,
}

/// A user whose guests are never admitted, as written in a policy file. Two entries with the same
/// name are equal, wherever they were written.
#[derive(Clone, Debug, Eq, Deserialize)]
#[serde(from = "Spanned<NumberOrText>")]
pub struct BlockedUser {
    /// Login name, or the uid as text.
    pub name: String,
    /// File and line in which the entry was written.
    #[serde(rename = "place")]
    pub source: String,
    /// Byte offset of the entry in its file.
    #[serde(rename = "at")]
    offset: usize,
}

impl From<Spanned<NumberOrText>> for BlockedUser {
    fn from(said: Spanned<NumberOrText>) -> BlockedUser {
        let at = said.span().start;
        let name = match said.into_inner() {
            NumberOrText::Number(uid) => uid.to_string(),
            NumberOrText::Text(name) => name,
        };
        BlockedUser {
            name,
            source: String::new(),
            offset: at,
        }
    }
}

impl PartialEq for BlockedUser {
    fn eq(&self, other: &BlockedUser) -> bool {
        self.name == other.name
    }
}

/// The settings of one policy file. A missing setting is taken from the policy with the next lower
/// priority.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// Names of the users who are owners in addition to root; if missing, all users are owners.
    /// Permitted only in the administrator's file.
    pub owners: Option<Vec<String>>,
    /// Times at which no guests may run.
    #[serde(rename = "never")]
    pub forbidden_hours: Option<Vec<WeeklyHours>>,
    /// The only times at which guests may run.
    #[serde(rename = "only")]
    pub allowed_hours: Option<Vec<WeeklyHours>>,
    /// Maximum number of guests, and of processors that all guests together use.
    pub cores: Option<u32>,
    /// Memory that must stay available for the owner.
    pub memory_free: Option<MemorySize>,
    /// Nice level of guests, 0 to 19.
    pub nice: Option<u8>,
    /// Time limit for guests to be evicted after they must stop; until then they are paused.
    pub leave_after: Option<LeaveAfter>,
    /// How guests are evicted.
    #[serde(rename = "then")]
    pub eviction_mode: Option<EvictionMode>,
    /// Minutes without input after which a user who is logged in is only possibly present.
    pub idle_after_min: Option<u32>,
    /// Programs and users that are never admitted.
    pub blocked: Option<Blocked>,
}

/// Error of a policy that was refused. The previous policy of this source stays in force; if there
/// was none, no guest may run.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{file}, line {line}: {reason}")]
pub struct PolicyError {
    pub file: String,
    /// Line number, starting at 1.
    pub line: usize,
    pub reason: String,
}

impl PolicyError {
    /// Converts an error of the TOML parser; `file` and `text` are the name and content of the
    /// policy file.
    pub(crate) fn from_toml(file: &str, text: &str, error: &toml::de::Error) -> PolicyError {
        let reason = error
            .message()
            .lines()
            .map(str::trim)
            .collect::<Vec<_>>()
            .join(" ");
        PolicyError {
            file: file.to_string(),
            line: error.span().map_or(1, |span| line_number(text, span.start)),
            reason,
        }
    }
}

/// Returns the number of the line in which a key is set, starting at 1; 1 if there is no such line.
pub(crate) fn line_of_key(text: &str, key: &str) -> usize {
    let is = |l: &str| {
        l.trim_start()
            .strip_prefix(key)
            .is_some_and(|rest| rest.trim_start().starts_with('='))
    };
    text.lines().position(is).map_or(1, |at| at + 1)
}

impl Policy {
    /// Parses the text of a policy file; errors contain `file` as its name.
    ///
    /// # Errors
    /// Contains the line and the reason.
    pub fn parse(file: &str, text: &str) -> Result<Policy, PolicyError> {
        let refused = |line, reason| PolicyError {
            file: file.to_string(),
            line,
            reason,
        };
        if text.len() > POLICY_BYTES_MAX {
            return Err(refused(
                1,
                format!("the file is longer than {POLICY_BYTES_MAX} bytes"),
            ));
        }
        let mut policy: Policy =
            toml::from_str(text).map_err(|error| PolicyError::from_toml(file, text, &error))?;
        let users = policy
            .blocked
            .iter_mut()
            .flat_map(|blocked| &mut blocked.users)
            .flatten();
        users.for_each(|user| {
            user.source = format!("{file}, line {}", line_number(text, user.offset))
        });
        policy
            .validate()
            .map_err(|(key, reason)| refused(line_of_key(text, key), reason))?;
        Ok(policy)
    }

    /// Parses the text of a policy file of any user other than the administrator.
    ///
    /// # Errors
    /// As [`Policy::parse`], and if the text sets `owners`.
    pub fn parse_own(file: &str, text: &str) -> Result<Policy, PolicyError> {
        let policy = Policy::parse(file, text)?;
        if policy.owners.is_none() {
            return Ok(policy);
        }
        let reason = "owners: only the administrator's file may name the owners".to_string();
        Err(PolicyError {
            file: file.to_string(),
            line: line_of_key(text, "owners"),
            reason,
        })
    }

    /// True if the policy contains no setting.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Policy::default()
    }

    /// Checks rules that the types cannot express. The error contains the key and the reason.
    fn validate(&self) -> Result<(), (&'static str, String)> {
        if let Some(nice) = self.nice.filter(|nice| *nice > 19) {
            return Err(("nice", format!("nice = {nice}: the highest level is 19")));
        }
        let blocked = self.blocked.clone().unwrap_or_default();
        let lists = [
            ("never", self.forbidden_hours.as_ref().map(Vec::len)),
            ("only", self.allowed_hours.as_ref().map(Vec::len)),
            ("owners", self.owners.as_ref().map(Vec::len)),
            ("programs", blocked.programs.as_ref().map(Vec::len)),
            ("users", blocked.users.as_ref().map(Vec::len)),
        ];
        match lists
            .iter()
            .find(|(_, len)| len.is_some_and(|len| len > LIST_ENTRIES_MAX))
        {
            Some((key, _)) => Err((
                key,
                format!("{key} has more than {LIST_ENTRIES_MAX} entries"),
            )),
            None => Ok(()),
        }
    }

    /// Returns the settings that the policy contains, by name, with their values as in a policy
    /// file.
    fn to_settings(&self) -> BTreeMap<&'static str, String> {
        let quoted = |list: Vec<String>| format!("[{}]", list.join(", "));
        let words =
            |list: &Vec<String>| quoted(list.iter().map(|word| format!("{word:?}")).collect());
        let hours = |list: &Vec<WeeklyHours>| {
            quoted(list.iter().map(|hours| format!("\"{hours}\"")).collect())
        };
        let users = |list: &Vec<BlockedUser>| {
            quoted(list.iter().map(|user| format!("{:?}", user.name)).collect())
        };
        let blocked = self.blocked.clone().unwrap_or_default();
        let all = [
            ("owners", self.owners.as_ref().map(words)),
            ("never", self.forbidden_hours.as_ref().map(hours)),
            ("only", self.allowed_hours.as_ref().map(hours)),
            ("cores", self.cores.map(|n| n.to_string())),
            (
                "memory_free",
                self.memory_free.map(|size| format!("\"{size}\"")),
            ),
            ("nice", self.nice.map(|n| n.to_string())),
            (
                "leave_after",
                self.leave_after.map(|after| match after {
                    LeaveAfter::Seconds(seconds) => seconds.to_string(),
                    LeaveAfter::Never => "\"never\"".into(),
                }),
            ),
            ("then", self.eviction_mode.map(|then| format!("\"{then}\""))),
            ("idle_after_min", self.idle_after_min.map(|n| n.to_string())),
            ("blocked.programs", blocked.programs.as_ref().map(words)),
            ("blocked.users", blocked.users.as_ref().map(users)),
        ];
        all.into_iter()
            .filter_map(|(name, text)| Some((name, text?)))
            .collect()
    }
}

/// A merged policy, with the origin of each setting.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MergedPolicy {
    pub policy: Policy,
    /// For each setting its name, its value as in a policy file, and its origin.
    pub settings: Vec<(&'static str, String, String)>,
}

impl MergedPolicy {
    /// Merges policies in descending priority, each given with its origin. Each setting is taken
    /// from the first policy that contains it.
    pub fn from_priority_list<'a>(
        policies: impl IntoIterator<Item = (String, &'a Policy)>,
    ) -> MergedPolicy {
        policies
            .into_iter()
            .fold(MergedPolicy::default(), |before, (from, policy)| {
                before.fill_from(MergedPolicy::from_single(from, policy.clone()))
            })
    }

    /// Creates a merged policy from one policy; all its settings have the origin `from`.
    fn from_single(from: String, policy: Policy) -> MergedPolicy {
        let settings = policy
            .to_settings()
            .into_iter()
            .map(|(name, value)| (name, value, from.clone()))
            .collect();
        MergedPolicy { policy, settings }
    }

    /// Adds the settings of `next` that this policy does not contain.
    pub fn fill_from(self, next: MergedPolicy) -> MergedPolicy {
        let MergedPolicy {
            policy,
            mut settings,
        } = self;
        let new =
            |(name, ..): &(&str, String, String)| settings.iter().all(|(known, ..)| known != name);
        let more: Vec<_> = next.settings.into_iter().filter(new).collect();
        settings.extend(more);
        let Policy {
            owners,
            forbidden_hours: never,
            allowed_hours: only,
            cores,
            memory_free,
            nice,
            leave_after,
            eviction_mode: then,
            idle_after_min,
            blocked,
        } = next.policy;
        let mut merged_blocked = policy.blocked.unwrap_or_default();
        let blocked = blocked.unwrap_or_default();
        merged_blocked.programs = merged_blocked.programs.or(blocked.programs);
        merged_blocked.users = merged_blocked.users.or(blocked.users);
        let policy = Policy {
            owners: policy.owners.or(owners),
            forbidden_hours: policy.forbidden_hours.or(never),
            allowed_hours: policy.allowed_hours.or(only),
            cores: policy.cores.or(cores),
            memory_free: policy.memory_free.or(memory_free),
            nice: policy.nice.or(nice),
            leave_after: policy.leave_after.or(leave_after),
            eviction_mode: policy.eviction_mode.or(then),
            idle_after_min: policy.idle_after_min.or(idle_after_min),
            blocked: Some(merged_blocked),
        };
        MergedPolicy { policy, settings }
    }

    /// Merges the policies of two owners with equal rights: the more restrictive value of each
    /// setting is used. Of two eviction modes, the one that is more certain to free the machine is
    /// used.
    pub fn restrict_by(self, other: MergedPolicy) -> MergedPolicy {
        let (a, b) = (self.policy, other.policy);
        let blocked = (a.blocked.unwrap_or_default(), b.blocked.unwrap_or_default());
        let sooner = |after: &LeaveAfter| match after {
            LeaveAfter::Seconds(seconds) => *seconds,
            LeaveAfter::Never => u64::MAX,
        };
        let surer = |then: &EvictionMode| match then {
            EvictionMode::Kill => 2,
            EvictionMode::Checkpoint => 1,
            EvictionMode::Move => 0,
        };
        let policy = Policy {
            owners: union(a.owners, b.owners),
            forbidden_hours: union(a.forbidden_hours, b.forbidden_hours),
            // A truncated list permits fewer hours than each of the two policies, never more.
            allowed_hours: combine(a.allowed_hours, b.allowed_hours, |a, b| {
                a.iter()
                    .flat_map(|a| b.iter().flat_map(|b| a.intersection(b)))
                    .take(LIST_ENTRIES_MAX)
                    .collect()
            }),
            cores: combine(a.cores, b.cores, |a, b| a.min(b)),
            memory_free: combine(a.memory_free, b.memory_free, |a, b| {
                MemorySize(a.0.max(b.0))
            }),
            nice: combine(a.nice, b.nice, |a, b| a.max(b)),
            leave_after: a
                .leave_after
                .into_iter()
                .chain(b.leave_after)
                .min_by_key(sooner),
            eviction_mode: a
                .eviction_mode
                .into_iter()
                .chain(b.eviction_mode)
                .max_by_key(surer),
            idle_after_min: combine(a.idle_after_min, b.idle_after_min, |a, b| a.max(b)),
            blocked: Some(Blocked {
                programs: union(blocked.0.programs, blocked.1.programs),
                users: union(blocked.0.users, blocked.1.users),
            }),
        };
        let said: Vec<(&str, String, String)> =
            self.settings.into_iter().chain(other.settings).collect();
        // The origin of a setting is the policy from which its value was taken, or all policies
        // from which the value was computed.
        let from = |name: &str, value: &str| {
            let of_it: Vec<_> = said.iter().filter(|(known, ..)| *known == name).collect();
            let sayer = of_it
                .iter()
                .find(|(_, known, _)| known == value)
                .map(|(.., from)| from.clone());
            sayer.unwrap_or_else(|| {
                let all: Vec<&str> = of_it.iter().map(|(.., from)| from.as_str()).collect();
                all.join(" and ")
            })
        };
        let with_from = |(name, value): (&'static str, String)| {
            let from = from(name, &value);
            (name, value, from)
        };
        let settings = policy.to_settings().into_iter().map(with_from).collect();
        MergedPolicy { policy, settings }
    }
}

/// Combines two values with `of` if both are present; otherwise returns the present one, if any.
fn combine<T>(a: Option<T>, b: Option<T>, merge: impl Fn(T, T) -> T) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) => Some(merge(a, b)),
        (a, b) => a.or(b),
    }
}

/// Returns the union of two lists, truncated to [`UNION_ENTRIES_MAX`] entries.
fn union<T: PartialEq>(a: Option<Vec<T>>, b: Option<Vec<T>>) -> Option<Vec<T>> {
    combine(a, b, |mut a, b| {
        let new: Vec<T> = b.into_iter().filter(|one| !a.contains(one)).collect();
        a.extend(new);
        a.truncate(UNION_ENTRIES_MAX);
        a
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The example policy file from the documentation.
    const EXAMPLE: &str = include_str!("../../docs/owner.toml");

    /// The example file is valid, with and without its commented-out lines, and contains every
    /// setting.
    #[test]
    fn example_policy_covers_all_settings() {
        let policy = Policy::parse("owner.toml", EXAMPLE).expect("the example is good");
        let said =
            MergedPolicy::from_priority_list([("the example".to_string(), &policy)]).settings;
        let names: Vec<&str> = said.iter().map(|(name, ..)| *name).collect();
        let all = [
            "blocked.programs",
            "blocked.users",
            "cores",
            "idle_after_min",
            "leave_after",
            "memory_free",
            "never",
            "nice",
            "only",
            "owners",
            "then",
        ];
        let uncommented: String = EXAMPLE
            .lines()
            .map(|l| l.strip_prefix("#! ").unwrap_or(l))
            .map(|l| format!("{l}\n"))
            .collect();
        let whole = Policy::parse("owner.toml", &uncommented)
            .expect("what is commented out is good as well");
        let mut every: Vec<&str> = MergedPolicy::from_priority_list([(String::new(), &whole)])
            .settings
            .iter()
            .map(|(name, ..)| *name)
            .collect();
        every.sort_unstable();
        assert_eq!(every, all);
        assert!(names.iter().all(|name| all.contains(name)) && !names.is_empty());
    }

    /// The error of a policy contains file, line and reason in one line of text.
    #[test]
    fn policy_errors_name_file_line_and_reason() {
        for (text, line, reason) in [
            (
                "cores = 2\nnever = [\"9-17\", \"noon\"]\n",
                2,
                "\"noon\" is not a time of the week",
            ),
            ("\n\ncorse = 2\n", 3, "unknown field `corse`"),
            ("cores = -1", 1, "invalid value"),
            ("nice = 3\nnice = 4\n", 2, "duplicate key"),
            ("cores = 1\nnice = 20\n", 2, "the highest level is 19"),
            (
                "memory_free = \"lots\"",
                1,
                "\"lots\" is not an amount of memory",
            ),
            ("then = \"wait\"", 1, "unknown variant `wait`"),
            ("leave_after = \"soon\"", 1, "\"soon\" is neither a number"),
            ("leave_after = 100000", 1, "more than a day"),
            ("a = [", 1, ""),
            (
                "[blocked]\nprogramms = []\n",
                2,
                "unknown field `programms`",
            ),
            (
                "[blocked]\nusers = [\"bob\", -1]\n",
                2,
                "expected a number from 0 on or a text in quotes",
            ),
        ] {
            let error = Policy::parse("o.toml", text).expect_err(text);
            assert_eq!(
                (error.file.as_str(), error.line),
                ("o.toml", line),
                "{error}"
            );
            let told = error.to_string();
            assert!(told.contains(reason) && told.lines().count() == 1, "{told}");
        }
        let long = format!("never = [{}]", "\"1-2\",".repeat(LIST_ENTRIES_MAX + 1));
        assert!(Policy::parse("o.toml", &long).is_err());
        assert!(Policy::parse("o.toml", &"#".repeat(POLICY_BYTES_MAX + 1)).is_err());
    }

    /// Each setting is taken from the first policy that contains it, and the merged policy names
    /// its origin.
    #[test]
    fn first_policy_with_a_setting_determines_it() {
        let parse = |text: &str| Policy::parse("x", text).expect("good");
        let owner = parse("never = [\"9-17\"]\n[blocked]\nusers = [\"bob\"]");
        let admin = parse("never = []\ncores = 2\n[blocked]\nprograms = [\"miner\"]\nusers = []");
        let merged = MergedPolicy::from_priority_list([
            ("owner".to_string(), &owner),
            ("admin".to_string(), &admin),
        ]);
        assert_eq!(merged.policy.forbidden_hours, owner.forbidden_hours);
        assert_eq!(merged.policy.cores, Some(2));
        let blocked = merged.policy.blocked.expect("said");
        let users: Vec<(&str, &str)> = blocked
            .users
            .iter()
            .flatten()
            .map(|user| (user.name.as_str(), user.source.as_str()))
            .collect();
        assert_eq!(users, [("bob", "x, line 3")]);
        assert_eq!(blocked.programs, Some(vec!["miner".to_string()]));
        let from = |name: &str| {
            merged
                .settings
                .iter()
                .find(|(n, ..)| *n == name)
                .map(|(.., from)| from.as_str())
        };
        assert_eq!(
            (from("never"), from("cores"), from("nice")),
            (Some("owner"), Some("admin"), None)
        );
    }

    /// If several owners have policies, the most restrictive value of each setting is used.
    #[test]
    fn most_restrictive_owner_wins_per_setting() {
        let one = |from: &str, text: &str| {
            MergedPolicy::from_priority_list([(
                from.to_string(),
                &Policy::parse("x", text).expect("good"),
            )])
        };
        let olga = "only = [\"mon-fri 18-8\"]\ncores = 3\nnice = 5\nleave_after = \"never\"\nmemory_free = \"2G\"\n\
                    [blocked]\nusers = [\"bob\"]";
        let otto = "only = [\"mon,tue\"]\nnever = [\"12-13\"]\ncores = 2\nleave_after = 60\nmemory_free = \"1G\"\n\
                    then = \"kill\"\n[blocked]\nusers = [\"eve\", \"bob\"]";
        let both = one("olga", olga).restrict_by(one("otto", otto));
        let told = |name: &str| {
            let found = both.settings.iter().find(|(known, ..)| *known == name);
            found
                .map(|(_, value, from)| format!("{value} ({from})"))
                .expect(name)
        };
        assert_eq!(told("cores"), "2 (otto)");
        assert_eq!(told("memory_free"), "\"2G\" (olga)");
        assert_eq!(told("nice"), "5 (olga)");
        assert_eq!(told("leave_after"), "60 (otto)");
        assert_eq!(told("then"), "\"kill\" (otto)");
        assert_eq!(told("never"), "[\"12:00-13:00\"] (otto)");
        assert_eq!(
            told("only"),
            "[\"mon-tue 18:00-24:00\", \"tue 0:00-8:00\"] (olga and otto)"
        );
        assert_eq!(told("blocked.users"), "[\"bob\", \"eve\"] (olga and otto)");
    }

    /// Blocked users are given by name or uid, and each entry keeps its file and line.
    #[test]
    fn blocked_users_keep_their_file_and_line() {
        let text = "nice = 1\n[blocked]\nusers = [\"bob\", 1007,\n  \"1008\",\n\n  \"eve\"]\n";
        let policy = Policy::parse("o.toml", text).expect("good");
        let settings = policy.to_settings();
        let users = policy
            .blocked
            .and_then(|blocked| blocked.users)
            .expect("said");
        let said: Vec<String> = users
            .into_iter()
            .map(|user| format!("{} {}", user.source, user.name))
            .collect();
        assert_eq!(
            said,
            [
                "o.toml, line 3 bob",
                "o.toml, line 3 1007",
                "o.toml, line 4 1008",
                "o.toml, line 6 eve"
            ]
        );
        assert_eq!(
            settings["blocked.users"],
            "[\"bob\", \"1007\", \"1008\", \"eve\"]"
        );
    }

    #[test]
    fn only_admin_policy_may_name_owners() {
        let text = "cores = 1\nowners = [\"me\"]\n";
        assert_eq!(
            Policy::parse("o", text).expect("good").owners,
            Some(vec!["me".to_string()])
        );
        let error = Policy::parse_own("o", text).expect_err("not his to say");
        assert!(
            error.line == 2 && error.reason.contains("administrator"),
            "{error}"
        );
    }

    /// Memory sizes are parsed and formatted; malformed sizes and sizes above 64 bits are refused.
    #[test]
    fn memory_sizes_are_parsed_and_formatted() {
        for (text, bytes) in [("4G", 4 << 30), ("512M", 512 << 20), ("7", 7), ("0", 0)] {
            assert_eq!(text.parse(), Ok(MemorySize(bytes)));
            assert_eq!(MemorySize(bytes).to_string(), text);
        }
        assert!(
            "G".parse::<MemorySize>().is_err()
                && "".parse::<MemorySize>().is_err()
                && "99999999999999T".parse::<MemorySize>().is_err()
        );
    }

    proptest! {
        /// Any text is parsed, or refused with a line number inside the text.
        #[test]
        fn any_text_parses_or_fails_with_valid_line(text in "(?s)[a-z0-9 =\\[\\]\"\n-]{0,80}|.{0,40}") {
            if let Err(error) = Policy::parse("f", &text) {
                prop_assert!(error.line >= 1 && error.line <= text.lines().count().max(1) + 1, "{}", error);
            }
        }
    }
}
