//! Constraints and preferences of a spawn, parsed from a small text, for example:
//!
//! ```text
//! memory >= 2G; arch = LINUX64; host != h3|h4; spread; rank = speed
//! ```
//!
//! The grammar:
//!
//! ```text
//! text      = part { (";" | ",") part }
//! part      = condition | "rank" "=" ["-"] figure | "same-host"
//!          | "spread" [ "=" number ] | "barrier" | "work" "=" seconds
//! condition = name ("=" | "!=") value { "|" value }
//!          | name (">=" | "<=" | ">" | "<") value
//! figure    = "memory" | "cores" | "speed" | "free"
//! seconds   = number [ "s" | "m" | "h" ]
//! ```
//!
//! Names are `host_name`, `arch`, `history` (available bytes for each task), `cores`, `speed` (1000
//! is an ordinary host), `free` (idle processors), or a label that the administrator gave to hosts.
//! Sizes may end in K, M, G or T.
//!
//! A spawn passes the text in `where`, after a question mark and without flags that give `where`
//! another meaning, or in its environment as [`CONSTRAINTS_ENV`]. If both are present, both must
//! hold. The text contains no colon, because in `where` a directory follows the first colon.

use super::HostView;
use super::host_load::HostLoad;
use super::predict::WORK_LEFT_MAX;
use sempa_proto::Micros;
pub use sempa_proto::job::CONSTRAINTS_ENV;
use sempa_proto::task::{SPAWN_ARCH, SPAWN_HOST, SpawnRequest};
use sempa_proto::text::split_memory_size;
use std::fmt;
use std::sync::Arc;
use thiserror::Error;

/// Maximum length of a constraints text, in bytes.
pub const CONSTRAINTS_BYTES_MAX: usize = 4096;

/// Host attribute that a condition compares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attribute {
    Host,
    Arch,
    Metric(Metric),
    /// Label that the administrator gave the host.
    Label(String),
}

/// Numeric attribute of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Memory that is available without swapping, in bytes.
    Memory,
    Cores,
    /// Relative speed; 1000 is an ordinary host.
    Speed,
    /// Idle processors, in hundredths.
    Free,
}

/// Comparison operator of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    /// Equal to one of the values.
    OneOf,
    /// Equal to none of the values.
    NoneOf,
    AtLeast,
    AtMost,
    Above,
    Below,
}

/// One condition of a spawn; all of them must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    pub attribute: Attribute,
    pub op: Operator,
    /// Right-hand sides as written. There is exactly one, except with [`Operator::OneOf`] and
    /// [`Operator::NoneOf`].
    pub values: Vec<String>,
    /// The parsed `values` if the attribute is numeric.
    numbers: Vec<u64>,
}

/// How the tasks of one spawn share hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Colocation {
    #[default]
    Any,
    /// All tasks on one host.
    SameHost,
    /// At most this many tasks per host.
    Spread(u32),
}

/// Preferred order of the hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    pub by: Metric,
    /// True if hosts with the smallest value are preferred; false for the largest value.
    pub ascending: bool,
}

/// Constraints and preferences of a spawn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Constraints {
    pub conditions: Vec<Arc<Condition>>,
    pub colocation: Colocation,
    /// Preferred order; without one, hosts are chosen by load.
    pub rank: Option<Rank>,
    /// The tasks of the job wait for each other at barriers: the job is as fast as its slowest
    /// task.
    pub barrier: bool,
    /// Work of each task as declared by the program, in time of an ordinary processor.
    pub work: Option<Micros>,
}

/// Error in a constraints text. A spawn with such a text fails.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConstraintsError {
    /// The part is neither a condition nor a keyword.
    #[error("{0:?} is not a requirement; examples: 'memory >= 2G', 'host != h3|h4'")]
    InvalidPart(String),
    /// A numeric attribute is compared with something that is not a number.
    #[error("{value:?} is not a number for {name}")]
    NotANumber { name: String, value: String },
    /// An attribute without an order, such as `host` or `arch`, is compared with an operator
    /// other than `=` and `!=`.
    #[error("{0} can only be compared with '=' or '!='")]
    NotOrdered(String),
    #[error("the requirements are longer than {CONSTRAINTS_BYTES_MAX} bytes")]
    TooLong,
}

impl Metric {
    fn from_name(name: &str) -> Option<Metric> {
        Some(match name {
            "memory" => Metric::Memory,
            "cores" => Metric::Cores,
            "speed" => Metric::Speed,
            "free" => Metric::Free,
            _ => return None,
        })
    }

    /// Returns the value of this attribute for a host at `now`; `None` if the sample is missing or
    /// too old. `load` is called only for [`Metric::Free`].
    pub(super) fn value_on(
        self,
        host: &HostView,
        now: Micros,
        load: impl Fn() -> HostLoad,
    ) -> Option<u64> {
        let fresh = || host.fresh_sample(now);
        match self {
            Metric::Memory => fresh().and_then(|_| host.available_bytes()),
            Metric::Cores => fresh().map(|s| u64::from(s.sample.cores)),
            Metric::Speed => Some(u64::try_from(host.speed).unwrap_or(0)),
            Metric::Free => fresh().map(|_| load().free_percent()),
        }
    }

    /// Formats a value with a readable unit.
    pub(super) fn format_value(self, value: u64) -> String {
        match self {
            Metric::Memory => {
                let units = [
                    (1_u64 << 40, "T"),
                    (1 << 30, "G"),
                    (1 << 20, "M"),
                    (1 << 10, "K"),
                ];
                let unit = units.iter().find(|(size, _)| value >= *size);
                unit.map_or(value.to_string(), |(size, name)| {
                    format!("{:.1}{name}", value as f64 / *size as f64)
                })
            }
            Metric::Free => format!("{:.2}", value as f64 / 100.0),
            Metric::Cores | Metric::Speed => value.to_string(),
        }
    }

    fn parse_value(self, text: &str) -> Option<u64> {
        match self {
            Metric::Memory => {
                let (digits, shift) = split_memory_size(text)?;
                let value: f64 = digits
                    .parse()
                    .ok()
                    .filter(|v: &f64| v.is_finite() && *v >= 0.0)?;
                let bytes = value * (1_u64 << shift) as f64;
                (bytes < u64::MAX as f64).then_some(bytes as u64)
            }
            Metric::Free => {
                let value: f64 = text
                    .parse()
                    .ok()
                    .filter(|v: &f64| v.is_finite() && (0.0..1e9).contains(v))?;
                Some((value * 100.0).round() as u64)
            }
            Metric::Cores | Metric::Speed => text.parse().ok(),
        }
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Metric::Memory => "memory",
            Metric::Cores => "cores",
            Metric::Speed => "speed",
            Metric::Free => "free",
        })
    }
}

impl fmt::Display for Attribute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Attribute::Host => f.write_str("host"),
            Attribute::Arch => f.write_str("arch"),
            Attribute::Metric(figure) => figure.fmt(f),
            Attribute::Label(label) => f.write_str(label),
        }
    }
}

impl Operator {
    /// Operators in the order in which the parser tries them. Longer ones come first, because
    /// shorter ones are their prefixes.
    const ALL: [(&'static str, Operator); 6] = [
        ("!=", Operator::NoneOf),
        (">=", Operator::AtLeast),
        ("<=", Operator::AtMost),
        ("=", Operator::OneOf),
        (">", Operator::Above),
        ("<", Operator::Below),
    ];

    fn is_ordering(self) -> bool {
        !matches!(self, Operator::OneOf | Operator::NoneOf)
    }

    fn holds<T: PartialOrd>(self, has: &T, values: &[T]) -> bool {
        match self {
            Operator::OneOf => values.contains(has),
            Operator::NoneOf => !values.contains(has),
            Operator::AtLeast => values.iter().all(|v| has >= v),
            Operator::AtMost => values.iter().all(|v| has <= v),
            Operator::Above => values.iter().all(|v| has > v),
            Operator::Below => values.iter().all(|v| has < v),
        }
    }
}

impl fmt::Display for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            Operator::ALL
                .iter()
                .find(|(_, op)| op == self)
                .map_or("", |(text, _)| text),
        )
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} {}",
            self.attribute,
            self.op,
            self.values.join("|")
        )
    }
}

/// Actual value of an attribute on a host that does not meet a condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ActualValue<S = String> {
    Number(Metric, u64),
    /// A host name, architecture or label.
    Text(S),
    /// The host has not reported the value, or its sample is too old.
    Unknown,
    /// The host has no such label.
    NoLabel,
}

impl ActualValue<&str> {
    /// Converts borrowed text to owned text.
    pub(super) fn into_owned(self) -> ActualValue {
        match self {
            ActualValue::Number(figure, value) => ActualValue::Number(figure, value),
            ActualValue::Text(text) => ActualValue::Text(text.into()),
            ActualValue::Unknown => ActualValue::Unknown,
            ActualValue::NoLabel => ActualValue::NoLabel,
        }
    }
}

impl<S: fmt::Display> fmt::Display for ActualValue<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ActualValue::Number(figure, value) => f.write_str(&figure.format_value(*value)),
            ActualValue::Text(text) => text.fmt(f),
            ActualValue::Unknown => f.write_str("unknown"),
            ActualValue::NoLabel => f.write_str("no such label"),
        }
    }
}

/// Returns the host's actual value if the host does not meet the condition; `None` if it meets it.
fn actual_if_unmet<'a>(
    condition: &Condition,
    host: &'a HostView,
    now: Micros,
    load: impl Fn() -> HostLoad,
) -> Option<ActualValue<&'a str>> {
    let Condition {
        attribute: name,
        op,
        values,
        numbers,
    } = condition;
    let text =
        |has: &'a String| (!op.holds(has, values)).then_some(ActualValue::Text(has.as_str()));
    match name {
        Attribute::Host => text(&host.name),
        Attribute::Arch => text(&host.arch),
        Attribute::Metric(figure) => match figure.value_on(host, now, load) {
            None => Some(ActualValue::Unknown),
            Some(has) => (!op.holds(&has, numbers)).then_some(ActualValue::Number(*figure, has)),
        },
        Attribute::Label(label) => match host.labels.get(label) {
            None => (*op != Operator::NoneOf).then_some(ActualValue::NoLabel),
            Some(has) if op.is_ordering() => match (has.parse::<f64>(), values[0].parse::<f64>()) {
                (Ok(has), Ok(wanted)) if op.holds(&has, &[wanted]) => None,
                _ => Some(ActualValue::Text(has)),
            },
            Some(has) => text(has),
        },
    }
}

impl Condition {
    fn parse(part: &str) -> Result<Condition, ConstraintsError> {
        let found = part.char_indices().find_map(|(at, _)| {
            Operator::ALL
                .iter()
                .find(|(text, _)| part[at..].starts_with(text))
                .map(|(text, op)| (at, at + text.len(), *op))
        });
        let wrong = || ConstraintsError::InvalidPart(part.to_string());
        let (end, begin, op) = found.ok_or_else(wrong)?;
        let (name, rest) = (part[..end].trim(), part[begin..].trim());
        let is_word = |c: char| c.is_alphanumeric() || "_-.".contains(c);
        if name.is_empty() || !name.chars().all(is_word) {
            return Err(wrong());
        }
        let values: Vec<String> = rest.split('|').map(|v| v.trim().to_string()).collect();
        if values.iter().any(String::is_empty) || (op.is_ordering() && values.len() > 1) {
            return Err(wrong());
        }
        let number = |figure: Metric| {
            let one = |v: &String| {
                figure
                    .parse_value(v)
                    .ok_or_else(|| ConstraintsError::NotANumber {
                        name: name.to_string(),
                        value: v.clone(),
                    })
            };
            values
                .iter()
                .map(one)
                .collect::<Result<Vec<u64>, ConstraintsError>>()
        };
        let (name, numbers) = match (name, Metric::from_name(name)) {
            ("host" | "arch", _) if op.is_ordering() => {
                return Err(ConstraintsError::NotOrdered(name.to_string()));
            }
            ("host", _) => (Attribute::Host, Vec::new()),
            ("arch", _) => (Attribute::Arch, Vec::new()),
            (_, Some(figure)) => (Attribute::Metric(figure), number(figure)?),
            (label, None) => (Attribute::Label(label.to_string()), Vec::new()),
        };
        Ok(Condition {
            attribute: name,
            op,
            values,
            numbers,
        })
    }
}

/// Parses a number of seconds, or a number with the suffix `s`, `m` or `h`. Longer durations
/// than [`WORK_LEFT_MAX`] are reduced to it.
fn parse_duration(text: &str) -> Option<Micros> {
    let units = [("h", 3600.0), ("m", 60.0), ("s", 1.0)];
    let unit = units
        .iter()
        .find_map(|(name, seconds)| Some((text.strip_suffix(name)?, *seconds)));
    let (digits, seconds) = unit.unwrap_or((text, 1.0));
    let span = digits.trim().parse::<f64>().ok()? * seconds;
    (span.is_finite() && span > 0.0).then(|| Micros((span * 1e6) as u64).min(WORK_LEFT_MAX))
}

impl Constraints {
    /// Parses a constraints text.
    ///
    /// # Errors
    /// [`ConstraintsError`] names the invalid part.
    pub fn parse(text: &str) -> Result<Constraints, ConstraintsError> {
        if text.len() > CONSTRAINTS_BYTES_MAX {
            return Err(ConstraintsError::TooLong);
        }
        let mut wants = Constraints::default();
        for part in text
            .split([';', ','])
            .map(str::trim)
            .filter(|p| !p.is_empty())
        {
            let wrong = || ConstraintsError::InvalidPart(part.to_string());
            let (word, value) = part
                .split_once('=')
                .map_or((part, None), |(w, v)| (w.trim(), Some(v.trim())));
            match (word, value) {
                ("barrier", None) => wants.barrier = true,
                ("same-host", None) => wants.colocation = Colocation::SameHost,
                ("work", Some(span)) => wants.work = Some(parse_duration(span).ok_or_else(wrong)?),
                ("spread", None) => wants.colocation = Colocation::Spread(1),
                ("spread", Some(most)) => {
                    let most = most.parse().ok().filter(|n| *n > 0).ok_or_else(wrong)?;
                    wants.colocation = Colocation::Spread(most);
                }
                ("rank", Some(by)) => {
                    let (least, by) = by
                        .strip_prefix('-')
                        .map_or((false, by), |by| (true, by.trim()));
                    wants.rank = Some(Rank {
                        by: Metric::from_name(by).ok_or_else(wrong)?,
                        ascending: least,
                    });
                }
                _ => wants.conditions.push(Arc::new(Condition::parse(part)?)),
            }
        }
        Ok(wants)
    }

    /// Returns the constraints of a spawn, combined from its environment and its `where` argument.
    ///
    /// # Errors
    /// [`ConstraintsError`] if one of the texts is invalid.
    pub fn from_request(request: &SpawnRequest) -> Result<Constraints, ConstraintsError> {
        let of_env = |entry: &Vec<u8>| {
            let text = std::str::from_utf8(entry).ok()?;
            text.strip_prefix(CONSTRAINTS_ENV)?
                .strip_prefix('=')
                .map(Constraints::parse)
        };
        // If the environment contains an entry twice, the last one counts, as for the spawned
        // program.
        let mut wants = request
            .env
            .iter()
            .rev()
            .find_map(of_env)
            .transpose()?
            .unwrap_or_default();
        let place = request.place.split(':').next().unwrap_or_default();
        if let Some(text) = place
            .strip_prefix('?')
            .filter(|_| request.flags & (SPAWN_HOST | SPAWN_ARCH) == 0)
        {
            let more = Constraints::parse(text)?;
            wants.conditions.extend(more.conditions);
            wants.rank = more.rank.or(wants.rank);
            wants.barrier |= more.barrier;
            wants.work = more.work.or(wants.work);
            if more.colocation != Colocation::Any {
                wants.colocation = more.colocation;
            }
        }
        Ok(wants)
    }

    /// Returns the first condition that the host does not meet at `now`, with the host's actual
    /// value.
    pub(super) fn first_unmet<'a>(
        &self,
        host: &'a HostView,
        now: Micros,
        load: impl Fn() -> HostLoad,
    ) -> Option<(Arc<Condition>, ActualValue<&'a str>)> {
        self.conditions
            .iter()
            .find_map(|c| Some((c.clone(), actual_if_unmet(c, host, now, &load)?)))
    }

    /// True if the host could not meet the conditions even without any task. Conditions on memory
    /// and idle processors are ignored, because their values change when tasks leave the host.
    pub(super) fn is_never_met(&self, host: &HostView, now: Micros) -> bool {
        let passes = |c: &&Arc<Condition>| {
            !matches!(
                c.attribute,
                Attribute::Metric(Metric::Memory | Metric::Free)
            )
        };
        let no_load = || unreachable!("only free processors depend on the load");
        self.conditions
            .iter()
            .filter(passes)
            .any(|c| actual_if_unmet(c, host, now, no_load).is_some())
    }

    /// Returns the memory in bytes that each task needs; `None` if no condition states a minimum.
    pub fn memory_bytes(&self) -> Option<u64> {
        let wanted = self
            .conditions
            .iter()
            .filter(|c| c.attribute == Attribute::Metric(Metric::Memory));
        wanted
            .filter(|c| matches!(c.op, Operator::AtLeast | Operator::Above))
            .filter_map(|c| c.numbers.first().copied())
            .max()
    }

    /// Returns the maximum number of tasks of this spawn that the memory of the host and the spread
    /// allow at `now`.
    pub(super) fn capacity(&self, host: &HostView, now: Micros) -> u32 {
        let spread = match self.colocation {
            Colocation::Spread(most) => most,
            Colocation::Any | Colocation::SameHost => u32::MAX,
        };
        let available = host
            .fresh_sample(now)
            .and_then(|_| host.available_bytes())
            .unwrap_or(0);
        let by_memory = self
            .memory_bytes()
            .and_then(|bytes| available.checked_div(bytes))
            .unwrap_or(u64::MAX);
        spread.min(u32::try_from(by_memory).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A text is parsed into conditions, rank, spread and declared work.
    #[test]
    fn parses_conditions_rank_and_spread() {
        let wants =
            Constraints::parse(" memory >= 1.5G ,arch=LINUX64|LINUX; host != h3 | h4;disk = ssd; spread=2; rank = -speed")
                .expect("good");
        let told: Vec<String> = wants.conditions.iter().map(|c| c.to_string()).collect();
        assert_eq!(
            told,
            [
                "memory >= 1.5G",
                "arch = LINUX64|LINUX",
                "host != h3|h4",
                "disk = ssd"
            ]
        );
        assert_eq!(wants.conditions[0].numbers, [3 << 29]);
        assert_eq!(
            wants.conditions[3].attribute,
            Attribute::Label("disk".into())
        );
        assert_eq!(
            (wants.colocation, wants.rank),
            (
                Colocation::Spread(2),
                Some(Rank {
                    by: Metric::Speed,
                    ascending: true
                })
            )
        );
        assert_eq!(
            Constraints::parse(" ;, ").expect("nothing is asked"),
            Constraints::default()
        );
        let work = |text: &str| Constraints::parse(text).expect("good").work;
        assert_eq!(
            (work("work = 90"), work("spread; work=1.5 m")),
            (Some(Micros::from_secs(90)), Some(Micros::from_secs(90)))
        );
        assert_eq!(
            (work("work = 1000h"), work("barrier")),
            (Some(WORK_LEFT_MAX), None)
        );
        assert_eq!(
            Constraints::parse("free>=0.5").expect("good").conditions[0].numbers,
            [50]
        );
    }

    /// The error of an invalid text names the invalid part.
    #[test]
    fn parse_error_names_invalid_part() {
        for (text, says) in [
            ("memory", "\"memory\" is not a requirement"),
            ("memory >= lots", "\"lots\" is not a number for memory"),
            ("cores >= 1.5", "\"1.5\" is not a number for cores"),
            ("host > h3", "host can only be compared"),
            ("cores >= 2|3", "\"cores >= 2|3\" is not"),
            ("host = h1|", "is not a requirement"),
            ("rank = luck", "\"rank = luck\" is not"),
            ("spread = 0", "\"spread = 0\" is not"),
            ("work = much", "\"work = much\" is not"),
            ("work = -1", "\"work = -1\" is not"),
            (" = 3", "is not a requirement"),
        ] {
            let error = Constraints::parse(text).expect_err(text).to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
        assert_eq!(
            Constraints::parse(&"x".repeat(5000)),
            Err(ConstraintsError::TooLong)
        );
    }

    /// The constraints in `where` and in the environment are combined; flags of `where` keep their
    /// meaning.
    #[test]
    fn constraints_come_from_where_and_environment() {
        let env = vec![b"SEMPA_WANTS=cores >= 4; rank = speed".to_vec()];
        let request = |flags, place: &str| SpawnRequest {
            flags,
            place: place.into(),
            env: env.clone(),
            ..SpawnRequest::default()
        };
        let both = Constraints::from_request(&request(0, "?memory >= 1G; rank = memory:/tmp"))
            .expect("good");
        assert_eq!(both.conditions.len(), 2);
        assert_eq!(
            both.rank,
            Some(Rank {
                by: Metric::Memory,
                ascending: false
            })
        );
        for (flags, place) in [
            (SPAWN_HOST, "?memory >= 1G"),
            (SPAWN_ARCH, "?x"),
            (0, "anything"),
            (0, ""),
        ] {
            assert_eq!(
                Constraints::from_request(&request(flags, place))
                    .expect("good")
                    .conditions
                    .len(),
                1,
                "{place}"
            );
        }
    }

    proptest! {
        /// Any text is parsed without a panic, and a formatted condition parses to the same
        /// condition.
        #[test]
        fn any_text_parses_safely_and_round_trips(text in "[a-z0-9 =!<>|;,.?GM-]{0,60}|.{0,40}") {
            if let Ok(wants) = Constraints::parse(&text) {
                for condition in &wants.conditions {
                    prop_assert_eq!(&Condition::parse(&condition.to_string())?, condition.as_ref());
                }
            }
        }
    }
}
