//! Policies about guests: TOML files of the owner, the administrator and the user of the virtual
//! machine, and the rules for merging them. Pure.
//!
//! - For each setting, the owner's value has priority over the administrator's, and the
//!   administrator's over the user's ([`MergedPolicy::fill_missing_from`]).
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
/// Maximum number of entries in each list of a policy file.
pub const LIST_ENTRIES_MAX: usize = 256;
/// Maximum number of entries of a list that was merged from several owners' lists.
const UNION_ENTRIES_MAX: usize = 4 * LIST_ENTRIES_MAX;
/// Maximum value of `leave_after`, in seconds: a day.
pub const LEAVE_AFTER_S_MAX: u64 = 86_400;
/// Default of `idle_after_min`: number of minutes without input after which a login counts as idle.
pub const DEFAULT_IDLE_AFTER_MIN: u32 = 15;

/// An amount of memory in bytes. In a policy file it is a number of bytes, or a text with the
/// suffix K, M, G or T.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "NumberOrText")]
pub struct MemorySize(pub u64);

/// Time for which guests stay paused for the owner before they are evicted.
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

/// A value of `leave_after` that is neither "never" nor a number of seconds up to
/// [`LEAVE_AFTER_S_MAX`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InvalidLeaveAfter {
    #[error("{0} seconds are more than a day")]
    TooLong(u64),
    #[error("{0:?} is neither a number of seconds nor \"never\"")]
    NotSeconds(String),
}

impl FromStr for MemorySize {
    type Err = InvalidMemorySize;

    fn from_str(text: &str) -> Result<Self, InvalidMemorySize> {
        let invalid_size = || InvalidMemorySize(text.to_string());
        let (digits, shift) = split_memory_size(text).ok_or_else(invalid_size)?;
        let number: u64 = digits.parse().map_err(|_| invalid_size())?;
        number
            .checked_mul(1 << shift)
            .map(MemorySize)
            .ok_or_else(invalid_size)
    }
}

impl TryFrom<NumberOrText> for MemorySize {
    type Error = InvalidMemorySize;

    fn try_from(value: NumberOrText) -> Result<Self, InvalidMemorySize> {
        match value {
            NumberOrText::Number(bytes) => Ok(Self(bytes)),
            NumberOrText::Text(text) => text.parse(),
        }
    }
}

impl fmt::Display for MemorySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
        let largest_unit = units
            .iter()
            .find(|(shift, _)| self.0 > 0 && self.0.trailing_zeros() >= *shift);
        match largest_unit {
            Some((shift, unit)) => write!(f, "{}{unit}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

impl TryFrom<NumberOrText> for LeaveAfter {
    type Error = InvalidLeaveAfter;

    fn try_from(value: NumberOrText) -> Result<Self, InvalidLeaveAfter> {
        match value {
            NumberOrText::Number(seconds) if seconds <= LEAVE_AFTER_S_MAX => {
                Ok(Self::Seconds(seconds))
            }
            NumberOrText::Number(seconds) => Err(InvalidLeaveAfter::TooLong(seconds)),
            NumberOrText::Text(text) if text == "never" => Ok(Self::Never),
            NumberOrText::Text(text) => Err(InvalidLeaveAfter::NotSeconds(text)),
        }
    }
}

impl fmt::Display for LeaveAfter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Seconds(seconds) => write!(f, "{seconds} s"),
            Self::Never => f.write_str("never"),
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
/// name are equal, even if their files and lines differ.
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
    byte_offset: usize,
}

impl From<Spanned<NumberOrText>> for BlockedUser {
    fn from(spanned_entry: Spanned<NumberOrText>) -> Self {
        let span_start = spanned_entry.span().start;
        let name = match spanned_entry.into_inner() {
            NumberOrText::Number(uid) => uid.to_string(),
            NumberOrText::Text(name) => name,
        };
        Self {
            name,
            source: String::new(),
            byte_offset: span_start,
        }
    }
}

impl PartialEq for BlockedUser {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// The settings of one policy file. A setting that the file does not contain is taken from the
/// policy with the next lower priority.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// Names of the users who are owners in addition to root; if missing, all users are owners.
    /// Permitted only in the administrator's file.
    pub owners: Option<Vec<String>>,
    /// Hours of the week at which no guests may run.
    #[serde(rename = "never")]
    pub forbidden_hours: Option<Vec<WeeklyHours>>,
    /// The only hours of the week at which guests may run; `None` if guests may run at all hours
    /// that are not forbidden.
    #[serde(rename = "only")]
    pub allowed_hours: Option<Vec<WeeklyHours>>,
    /// Maximum number of guests, and of processors that all guests together use.
    pub cores: Option<u32>,
    /// Memory that must stay available for the owner.
    pub memory_free: Option<MemorySize>,
    /// Nice level of guests, 0 to 19.
    pub nice: Option<u8>,
    /// Time for which guests stay paused for the owner before they are evicted.
    pub leave_after: Option<LeaveAfter>,
    /// How guests are evicted.
    #[serde(rename = "then")]
    pub eviction_mode: Option<EvictionMode>,
    /// Minutes without input after which a user who is logged in is only possibly present.
    pub idle_after_min: Option<u32>,
    /// Programs and users that are never admitted.
    pub blocked: Option<Blocked>,
    /// False if guests need not stop for an owner here, so that no load watcher is needed. Has no
    /// effect in the settings of a user who is not an owner.
    pub watch: Option<bool>,
}

/// Error of a policy file that was refused. The previous policy of the same file stays in force; if
/// there was none, no guest may run.
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
    pub(crate) fn from_toml(file: &str, text: &str, error: &toml::de::Error) -> Self {
        let reason = error
            .message()
            .lines()
            .map(str::trim)
            .collect::<Vec<_>>()
            .join(" ");
        Self {
            file: file.to_string(),
            line: error.span().map_or(1, |span| line_number(text, span.start)),
            reason,
        }
    }
}

/// Returns the number of the line in which a key is set, starting at 1; 1 if there is no such line.
pub(crate) fn line_of_key(text: &str, key: &str) -> usize {
    let sets_key = |l: &str| {
        l.trim_start()
            .strip_prefix(key)
            .is_some_and(|rest| rest.trim_start().starts_with('='))
    };
    text.lines()
        .position(sets_key)
        .map_or(1, |line_index| line_index + 1)
}

impl Policy {
    /// Parses the text of a policy file; errors contain `file` as its name.
    ///
    /// # Errors
    /// Contains the line and the reason.
    pub fn parse(file: &str, text: &str) -> Result<Self, PolicyError> {
        let refusal_error = |line, reason| PolicyError {
            file: file.to_string(),
            line,
            reason,
        };
        if text.len() > POLICY_BYTES_MAX {
            return Err(refusal_error(
                1,
                format!("the file is longer than {POLICY_BYTES_MAX} bytes"),
            ));
        }
        let mut policy: Self =
            toml::from_str(text).map_err(|error| PolicyError::from_toml(file, text, &error))?;
        let blocked_users = policy
            .blocked
            .iter_mut()
            .flat_map(|blocked| &mut blocked.users)
            .flatten();
        blocked_users.for_each(|user| {
            user.source = format!("{file}, line {}", line_number(text, user.byte_offset))
        });
        policy
            .validate()
            .map_err(|(key, reason)| refusal_error(line_of_key(text, key), reason))?;
        Ok(policy)
    }

    /// Parses the text of a policy file of any user other than the administrator.
    ///
    /// # Errors
    /// As [`Policy::parse`], and if the text sets `owners`.
    pub fn parse_without_owners(file: &str, text: &str) -> Result<Self, PolicyError> {
        let policy = Self::parse(file, text)?;
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
        *self == Self::default()
    }

    /// Checks the nice level and the lengths of the lists, because their types permit larger
    /// values. The error contains the key and the reason.
    fn validate(&self) -> Result<(), (&'static str, String)> {
        if let Some(nice) = self.nice.filter(|nice| *nice > 19) {
            return Err(("nice", format!("nice = {nice}: the highest level is 19")));
        }
        let blocked = self.blocked.clone().unwrap_or_default();
        let list_lengths = [
            ("never", self.forbidden_hours.as_ref().map(Vec::len)),
            ("only", self.allowed_hours.as_ref().map(Vec::len)),
            ("owners", self.owners.as_ref().map(Vec::len)),
            ("programs", blocked.programs.as_ref().map(Vec::len)),
            ("users", blocked.users.as_ref().map(Vec::len)),
        ];
        match list_lengths
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
        let bracketed = |entries: Vec<String>| format!("[{}]", entries.join(", "));
        let string_list = |entries: &Vec<String>| {
            bracketed(entries.iter().map(|string| format!("{string:?}")).collect())
        };
        let hours_list = |entries: &Vec<WeeklyHours>| {
            bracketed(
                entries
                    .iter()
                    .map(|hours_list| format!("\"{hours_list}\""))
                    .collect(),
            )
        };
        let user_list = |entries: &Vec<BlockedUser>| {
            bracketed(
                entries
                    .iter()
                    .map(|user| format!("{:?}", user.name))
                    .collect(),
            )
        };
        let blocked = self.blocked.clone().unwrap_or_default();
        let settings = [
            ("owners", self.owners.as_ref().map(string_list)),
            ("never", self.forbidden_hours.as_ref().map(hours_list)),
            ("only", self.allowed_hours.as_ref().map(hours_list)),
            ("cores", self.cores.map(|n| n.to_string())),
            (
                "memory_free",
                self.memory_free.map(|size| format!("\"{size}\"")),
            ),
            ("nice", self.nice.map(|n| n.to_string())),
            (
                "leave_after",
                self.leave_after.map(|leave_after| match leave_after {
                    LeaveAfter::Seconds(seconds) => seconds.to_string(),
                    LeaveAfter::Never => "\"never\"".into(),
                }),
            ),
            (
                "then",
                self.eviction_mode
                    .map(|eviction_mode| format!("\"{eviction_mode}\"")),
            ),
            ("idle_after_min", self.idle_after_min.map(|n| n.to_string())),
            ("watch", self.watch.map(|watch| watch.to_string())),
            (
                "blocked.programs",
                blocked.programs.as_ref().map(string_list),
            ),
            ("blocked.users", blocked.users.as_ref().map(user_list)),
        ];
        settings
            .into_iter()
            .filter_map(|(name, text)| Some((name, text?)))
            .collect()
    }
}

/// A merged policy, with the origin of each setting.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MergedPolicy {
    pub policy: Policy,
    /// For each setting: its name, its value as in a policy file, and its origin.
    pub settings: Vec<(&'static str, String, String)>,
}

impl MergedPolicy {
    /// Merges policies that are listed in descending priority, each with its origin. Each setting
    /// is taken from the first policy that contains the setting.
    pub fn from_priority_list<'a>(
        policies: impl IntoIterator<Item = (String, &'a Policy)>,
    ) -> Self {
        policies
            .into_iter()
            .fold(Self::default(), |merged, (origin, policy)| {
                merged.fill_missing_from(Self::from_single(origin, policy.clone()))
            })
    }

    /// Creates a merged policy from one policy; all settings have the origin `origin`.
    fn from_single(origin: String, policy: Policy) -> Self {
        let settings = policy
            .to_settings()
            .into_iter()
            .map(|(name, value)| (name, value, origin.clone()))
            .collect();
        Self { policy, settings }
    }

    /// Returns the origin of `watch = false`; `None` if the policy does not contain it.
    pub(crate) fn switch_off_source(&self) -> Option<String> {
        let mut settings = self.settings.iter();
        settings
            .find(|(name, value, _)| *name == "watch" && value == "false")
            .map(|(.., origin)| origin.clone())
    }

    /// Removes the setting `watch`, which has no effect in the settings of a user who is not an
    /// owner.
    pub(crate) fn remove_watch(&mut self) {
        self.policy.watch = None;
        self.settings.retain(|(name, ..)| *name != "watch");
    }

    /// Returns this policy with the settings of `lower_priority` that this policy does not contain.
    /// `lower_priority` is a policy of lower priority.
    pub fn fill_missing_from(self, lower_priority: Self) -> Self {
        let Self {
            policy,
            mut settings,
        } = self;
        let is_missing = |(name, ..): &(&str, String, String)| {
            settings
                .iter()
                .all(|(existing_name, ..)| existing_name != name)
        };
        let missing_settings: Vec<_> = lower_priority
            .settings
            .into_iter()
            .filter(is_missing)
            .collect();
        settings.extend(missing_settings);
        let Policy {
            owners,
            forbidden_hours: lower_forbidden,
            allowed_hours: lower_allowed,
            cores,
            memory_free,
            nice,
            leave_after,
            eviction_mode: lower_eviction_mode,
            idle_after_min,
            blocked,
            watch,
        } = lower_priority.policy;
        let mut merged_blocked = policy.blocked.unwrap_or_default();
        let blocked = blocked.unwrap_or_default();
        merged_blocked.programs = merged_blocked.programs.or(blocked.programs);
        merged_blocked.users = merged_blocked.users.or(blocked.users);
        let policy = Policy {
            owners: policy.owners.or(owners),
            forbidden_hours: policy.forbidden_hours.or(lower_forbidden),
            allowed_hours: policy.allowed_hours.or(lower_allowed),
            cores: policy.cores.or(cores),
            memory_free: policy.memory_free.or(memory_free),
            nice: policy.nice.or(nice),
            leave_after: policy.leave_after.or(leave_after),
            eviction_mode: policy.eviction_mode.or(lower_eviction_mode),
            idle_after_min: policy.idle_after_min.or(idle_after_min),
            blocked: Some(merged_blocked),
            watch: policy.watch.or(watch),
        };
        Self { policy, settings }
    }

    /// Merges the policies of two owners with equal rights: the more restrictive value of each
    /// setting is used. Of two eviction modes, the mode that frees the machine more reliably counts
    /// as more restrictive. For `idle_after_min`, the larger number counts as more restrictive.
    pub fn restrict_by(self, other: Self) -> Self {
        let (a, b) = (self.policy, other.policy);
        let blocked = (a.blocked.unwrap_or_default(), b.blocked.unwrap_or_default());
        let leave_seconds = |leave_after: &LeaveAfter| match leave_after {
            LeaveAfter::Seconds(seconds) => *seconds,
            LeaveAfter::Never => u64::MAX,
        };
        let eviction_certainty = |mode: &EvictionMode| match mode {
            EvictionMode::Kill => 2,
            EvictionMode::Checkpoint => 1,
            EvictionMode::Move => 0,
        };
        let policy = Policy {
            owners: merge_lists(a.owners, b.owners),
            forbidden_hours: merge_lists(a.forbidden_hours, b.forbidden_hours),
            // A truncated list permits fewer hours than each of the two policies, never more.
            allowed_hours: combine_options(a.allowed_hours, b.allowed_hours, |a, b| {
                a.iter()
                    .flat_map(|a| b.iter().flat_map(|b| a.intersection(b)))
                    .take(LIST_ENTRIES_MAX)
                    .collect()
            }),
            cores: combine_options(a.cores, b.cores, |a, b| a.min(b)),
            memory_free: combine_options(a.memory_free, b.memory_free, |a, b| {
                MemorySize(a.0.max(b.0))
            }),
            nice: combine_options(a.nice, b.nice, |a, b| a.max(b)),
            leave_after: a
                .leave_after
                .into_iter()
                .chain(b.leave_after)
                .min_by_key(leave_seconds),
            eviction_mode: a
                .eviction_mode
                .into_iter()
                .chain(b.eviction_mode)
                .max_by_key(eviction_certainty),
            idle_after_min: combine_options(a.idle_after_min, b.idle_after_min, |a, b| a.max(b)),
            blocked: Some(Blocked {
                programs: merge_lists(blocked.0.programs, blocked.1.programs),
                users: merge_lists(blocked.0.users, blocked.1.users),
            }),
            watch: combine_options(a.watch, b.watch, |a, b| a || b),
        };
        let source_settings: Vec<(&str, String, String)> =
            self.settings.into_iter().chain(other.settings).collect();
        // The origin of a setting is the policy from which its value was taken, or all policies
        // from which the value was computed.
        let origin = |name: &str, value: &str| {
            let candidates: Vec<_> = source_settings
                .iter()
                .filter(|(candidate_text, ..)| *candidate_text == name)
                .collect();
            let single_origin = candidates
                .iter()
                .find(|(_, candidate_text, _)| candidate_text == value)
                .map(|(.., origin)| origin.clone());
            single_origin.unwrap_or_else(|| {
                let origins: Vec<&str> = candidates
                    .iter()
                    .map(|(.., origin)| origin.as_str())
                    .collect();
                origins.join(" and ")
            })
        };
        let with_origin = |(name, value): (&'static str, String)| {
            let origin = origin(name, &value);
            (name, value, origin)
        };
        let settings = policy.to_settings().into_iter().map(with_origin).collect();
        Self { policy, settings }
    }
}

/// Returns the result of `merge` if both values are present; otherwise the present value, if any.
fn combine_options<T>(a: Option<T>, b: Option<T>, merge: impl Fn(T, T) -> T) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) => Some(merge(a, b)),
        (a, b) => a.or(b),
    }
}

/// Returns the union of two lists, truncated to [`UNION_ENTRIES_MAX`] entries.
fn merge_lists<T: PartialEq>(a: Option<Vec<T>>, b: Option<Vec<T>>) -> Option<Vec<T>> {
    combine_options(a, b, |mut a, b| {
        let added_entries: Vec<T> = b.into_iter().filter(|entry| !a.contains(entry)).collect();
        a.extend(added_entries);
        a.truncate(UNION_ENTRIES_MAX);
        a
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The example policy file from the documentation.
    const EXAMPLE_POLICY: &str = include_str!("../../docs/owner.toml");

    /// The example file is valid, with and without its commented-out lines, and contains every
    /// setting.
    #[test]
    fn example_policy_covers_all_settings() {
        let policy = Policy::parse("owner.toml", EXAMPLE_POLICY).expect("the example is good");
        let settings =
            MergedPolicy::from_priority_list([("the example".to_string(), &policy)]).settings;
        let names: Vec<&str> = settings.iter().map(|(name, ..)| *name).collect();
        let expected_names = [
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
            "watch",
        ];
        let uncommented_text: String = EXAMPLE_POLICY
            .lines()
            .map(|l| l.strip_prefix("#! ").unwrap_or(l))
            .map(|l| format!("{l}\n"))
            .collect();
        let full_policy = Policy::parse("owner.toml", &uncommented_text)
            .expect("what is commented out is good as well");
        let mut full_names: Vec<&str> =
            MergedPolicy::from_priority_list([(String::new(), &full_policy)])
                .settings
                .iter()
                .map(|(name, ..)| *name)
                .collect();
        full_names.sort_unstable();
        assert_eq!(full_names, expected_names);
        assert!(names.iter().all(|name| expected_names.contains(name)) && !names.is_empty());
    }

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
            let message = error.to_string();
            assert!(
                message.contains(reason) && message.lines().count() == 1,
                "{message}"
            );
        }
        let long_list = format!("never = [{}]", "\"1-2\",".repeat(LIST_ENTRIES_MAX + 1));
        assert!(Policy::parse("o.toml", &long_list).is_err());
        assert!(Policy::parse("o.toml", &"#".repeat(POLICY_BYTES_MAX + 1)).is_err());
    }

    /// Each setting is taken from the first policy that contains the setting, and this policy is
    /// the origin of the setting.
    #[test]
    fn first_policy_with_a_setting_determines_it() {
        let parse = |text: &str| Policy::parse("x", text).expect("good");
        let owner_policy = parse("never = [\"9-17\"]\n[blocked]\nusers = [\"bob\"]");
        let admin_policy =
            parse("never = []\ncores = 2\n[blocked]\nprograms = [\"miner\"]\nusers = []");
        let merged_policy = MergedPolicy::from_priority_list([
            ("owner".to_string(), &owner_policy),
            ("admin".to_string(), &admin_policy),
        ]);
        assert_eq!(
            merged_policy.policy.forbidden_hours,
            owner_policy.forbidden_hours
        );
        assert_eq!(merged_policy.policy.cores, Some(2));
        let blocked = merged_policy.policy.blocked.expect("said");
        let users: Vec<(&str, &str)> = blocked
            .users
            .iter()
            .flatten()
            .map(|user| (user.name.as_str(), user.source.as_str()))
            .collect();
        assert_eq!(users, [("bob", "x, line 3")]);
        assert_eq!(blocked.programs, Some(vec!["miner".to_string()]));
        let origin_of = |name: &str| {
            merged_policy
                .settings
                .iter()
                .find(|(n, ..)| *n == name)
                .map(|(.., origin_of)| origin_of.as_str())
        };
        assert_eq!(
            (origin_of("never"), origin_of("cores"), origin_of("nice")),
            (Some("owner"), Some("admin"), None)
        );
    }

    /// Of the settings of two owners, the most restrictive value of each setting is used. The
    /// origin of a value that was computed from both policies names both policies.
    #[test]
    fn most_restrictive_owner_wins_per_setting() {
        let parse_with_origin = |origin: &str, text: &str| {
            MergedPolicy::from_priority_list([(
                origin.to_string(),
                &Policy::parse("x", text).expect("good"),
            )])
        };
        let olga_policy_text = "only = [\"mon-fri 18-8\"]\ncores = 3\nnice = 5\nleave_after = \"never\"\nmemory_free = \"2G\"\n\
                    [blocked]\nusers = [\"bob\"]";
        let otto_policy_text = "only = [\"mon,tue\"]\nnever = [\"12-13\"]\ncores = 2\nleave_after = 60\nmemory_free = \"1G\"\n\
                    then = \"kill\"\n[blocked]\nusers = [\"eve\", \"bob\"]";
        let merged_policy = parse_with_origin("olga", olga_policy_text)
            .restrict_by(parse_with_origin("otto", otto_policy_text));
        let value_and_origin = |name: &str| {
            let setting = merged_policy
                .settings
                .iter()
                .find(|(setting_name, ..)| *setting_name == name);
            setting
                .map(|(_, value, origin)| format!("{value} ({origin})"))
                .expect(name)
        };
        assert_eq!(value_and_origin("cores"), "2 (otto)");
        assert_eq!(value_and_origin("memory_free"), "\"2G\" (olga)");
        assert_eq!(value_and_origin("nice"), "5 (olga)");
        assert_eq!(value_and_origin("leave_after"), "60 (otto)");
        assert_eq!(value_and_origin("then"), "\"kill\" (otto)");
        assert_eq!(value_and_origin("never"), "[\"12:00-13:00\"] (otto)");
        assert_eq!(
            value_and_origin("only"),
            "[\"mon-tue 18:00-24:00\", \"tue 0:00-8:00\"] (olga and otto)"
        );
        assert_eq!(
            value_and_origin("blocked.users"),
            "[\"bob\", \"eve\"] (olga and otto)"
        );
    }

    /// Each blocked user, given by name or by uid, is recorded with the file and line of its entry.
    #[test]
    fn blocked_users_keep_their_file_and_line() {
        let text = "nice = 1\n[blocked]\nusers = [\"bob\", 1007,\n  \"1008\",\n\n  \"eve\"]\n";
        let policy = Policy::parse("o.toml", text).expect("good");
        let settings = policy.to_settings();
        let users = policy
            .blocked
            .and_then(|blocked| blocked.users)
            .expect("said");
        let entries: Vec<String> = users
            .into_iter()
            .map(|user| format!("{} {}", user.source, user.name))
            .collect();
        assert_eq!(
            entries,
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
        let error = Policy::parse_without_owners("o", text).expect_err("not his to say");
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
