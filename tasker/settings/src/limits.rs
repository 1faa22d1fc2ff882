//! Kinds and values of limits.

use sempa_proto::text::split_memory_size;
use std::fmt;

/// Number of variants of [`LimitKind`].
const KIND_COUNT: usize = LimitKind::ALL.len();
/// Word for the absence of a limit.
const UNLIMITED_WORD: &str = "unlimited";

/// The resource that a limit restricts. All limits except that of descriptors count the use of a
/// user on this host by all virtual machines together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitKind {
    /// Tasks that run or arrive, and ended tasks that have left processes.
    Tasks,
    /// Anonymous and shared memory of all tasks, in bytes.
    Memory,
    /// Open descriptors of each process.
    Descriptors,
    /// Control groups of the user's tasks.
    ControlGroups,
    /// Images that the service keeps during migrations and checkpoints, in bytes.
    ImageBytes,
}

/// The values that a limit may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitRange {
    pub min: u64,
    pub max: u64,
    /// True if the limit may be absent.
    pub may_be_unlimited: bool,
    /// True if the limit is a number of bytes, for which units are accepted.
    pub is_bytes: bool,
}

impl LimitKind {
    pub const ALL: [Self; 5] = [
        Self::Tasks,
        Self::Memory,
        Self::Descriptors,
        Self::ControlGroups,
        Self::ImageBytes,
    ];

    /// Returns the key of the limit in the settings.
    pub fn key(self) -> &'static str {
        match self {
            Self::Tasks => "tasks",
            Self::Memory => "memory",
            Self::Descriptors => "descriptors",
            Self::ControlGroups => "control_groups",
            Self::ImageBytes => "image_bytes",
        }
    }

    /// Returns the kind with this key in the settings.
    pub fn from_key(key: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.key() == key)
    }

    pub fn range(self) -> LimitRange {
        let numbers = |min, max, may_be_unlimited| LimitRange {
            min,
            max,
            may_be_unlimited,
            is_bytes: false,
        };
        let bytes = |min| LimitRange {
            min,
            max: 1 << 60,
            may_be_unlimited: true,
            is_bytes: true,
        };
        match self {
            Self::Tasks => numbers(1, 100_000, false),
            Self::Memory => bytes(1 << 20),
            // A task needs some descriptors for its daemon and its output.
            Self::Descriptors => numbers(64, 1 << 30, true),
            Self::ControlGroups => numbers(1, 100_000, false),
            Self::ImageBytes => bytes(1 << 20),
        }
    }

    /// Returns the limit of users for whom the settings give none. Memory and descriptors are then
    /// limited by the user's login only.
    pub fn default_limit(self) -> Limit {
        match self {
            Self::Tasks => Limit::AtMost(512),
            Self::Memory | Self::Descriptors => Limit::Unlimited,
            Self::ControlGroups => Limit::AtMost(1024),
            Self::ImageBytes => Limit::AtMost(64 << 30),
        }
    }

    /// Parses a limit as in the settings or on a command line: a number, a number of bytes with the
    /// unit K, M, G or T, or "unlimited".
    ///
    /// # Errors
    /// The accepted values, as the end of a sentence.
    pub fn parse_limit(self, text: &str) -> Result<Limit, String> {
        let range = self.range();
        if text == UNLIMITED_WORD && range.may_be_unlimited {
            return Ok(Limit::Unlimited);
        }
        let number = match range.is_bytes {
            true => parse_bytes(text),
            false => text.parse().ok(),
        };
        number.map_or_else(|| Err(self.accepted_values()), |number| self.check(number))
    }

    /// Checks that a number is in the range of this limit.
    ///
    /// # Errors
    /// The accepted values, as the end of a sentence.
    pub(crate) fn check(self, number: u64) -> Result<Limit, String> {
        let range = self.range();
        match (range.min..=range.max).contains(&number) {
            true => Ok(Limit::AtMost(number)),
            false => Err(self.accepted_values()),
        }
    }

    fn accepted_values(self) -> String {
        let range = self.range();
        let unlimited = match range.may_be_unlimited {
            true => " or \"unlimited\"",
            false => "",
        };
        let display = |number| self.display(Limit::AtMost(number)).to_string();
        let (min, max) = (display(range.min), display(range.max));
        match range.is_bytes {
            true => format!(
                "expected a number of bytes or a text such as \"512M\" or \"16G\", from {min} to \
                 {max},{unlimited}"
            ),
            false => format!("expected a number from {min} to {max}{unlimited}"),
        }
    }

    /// Returns the text of a limit as in the settings, without quotes.
    pub fn display(self, limit: Limit) -> impl fmt::Display {
        let units = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
        let Limit::AtMost(number) = limit else {
            return UNLIMITED_WORD.to_string();
        };
        let fits = |shift: &u32| number > 0 && number.trailing_zeros() >= *shift;
        let unit = units.iter().find(|(shift, _)| fits(shift));
        match unit.filter(|_| self.range().is_bytes) {
            Some((shift, unit)) => format!("{}{unit}", number >> shift),
            None => number.to_string(),
        }
    }
}

fn parse_bytes(text: &str) -> Option<u64> {
    let (digits, shift) = split_memory_size(text)?;
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = digits.parse().ok().filter(|_| is_number)?;
    number.checked_mul(1 << shift)
}

/// The value of a limit. Smaller limits precede greater ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Limit {
    AtMost(u64),
    Unlimited,
}

impl Limit {
    /// True if a user may have this amount in all.
    pub fn permits(self, amount: u64) -> bool {
        match self {
            Self::AtMost(max) => amount <= max,
            Self::Unlimited => true,
        }
    }

    /// Returns the greatest permitted amount; `None` without a limit.
    pub fn max(self) -> Option<u64> {
        match self {
            Self::AtMost(max) => Some(max),
            Self::Unlimited => None,
        }
    }
}

/// The limits of one user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserLimits([Limit; KIND_COUNT]);

impl UserLimits {
    pub(crate) fn new(limit_of: impl Fn(LimitKind) -> Limit) -> Self {
        Self(LimitKind::ALL.map(limit_of))
    }

    pub fn get(&self, kind: LimitKind) -> Limit {
        self.0[kind as usize]
    }
}

/// Limits of which some are not given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PartialLimits([Option<Limit>; KIND_COUNT]);

impl PartialLimits {
    pub(crate) fn get(&self, kind: LimitKind) -> Option<Limit> {
        self.0[kind as usize]
    }

    pub(crate) fn set(&mut self, kind: LimitKind, limit: Limit) {
        self.0[kind as usize] = Some(limit);
    }
}
