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
//! Names are `host`, `arch`, `memory` (available bytes for each task), `cores`, `speed` (1000 is an
//! ordinary host), `free` (idle processors), or a label that the administrator gave to hosts. Sizes
//! may end in K, M, G or T.
//!
//! A spawn passes the text in `where`, after a question mark and without flags that give `where`
//! another meaning, or in its environment as [`CONSTRAINTS_ENV`]. If both texts are present, the
//! conditions of both must hold. The text contains no colon, because in `where` a directory follows
//! the first colon.

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
    /// Idle processors, in hundredths of a processor.
    IdleProcessors,
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

/// One condition of a spawn on its hosts. All conditions of a spawn must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    pub attribute: Attribute,
    pub operator: Operator,
    /// Right-hand sides of the condition, as written. There is exactly one, except with
    /// [`Operator::OneOf`] and [`Operator::NoneOf`].
    pub values: Vec<String>,
    /// `values` as numbers, in the metric's unit. Empty if the attribute is not a [`Metric`].
    parsed_numbers: Vec<u64>,
}

/// Rule by which the tasks of one spawn share hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Colocation {
    #[default]
    Any,
    /// All tasks on one host.
    SameHost,
    /// At most this many tasks per host.
    Spread(u32),
}

/// Preferred order of the hosts, by one numeric attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    pub metric: Metric,
    /// True if hosts with the smallest value are preferred; false for the largest value.
    pub ascending: bool,
}

/// Constraints and preferences of a spawn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Constraints {
    pub conditions: Vec<Arc<Condition>>,
    pub colocation: Colocation,
    /// Preferred order of the hosts. `None`: hosts are chosen by load.
    pub rank: Option<Rank>,
    /// True if the tasks of the job wait for each other at barriers: the job is as fast as its
    /// slowest task.
    pub barrier: bool,
    /// Work of each task as declared by the program, in time of an ordinary processor; `None` if
    /// the program declares none.
    pub work: Option<Micros>,
}

/// Error in a constraints text. The spawn fails.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConstraintsError {
    /// A part of the text is neither a condition nor a keyword.
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
    fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "memory" => Self::Memory,
            "cores" => Self::Cores,
            "speed" => Self::Speed,
            "free" => Self::IdleProcessors,
            _ => return None,
        })
    }

    /// Returns the value of this attribute for a host at `now`; `None` if the sample is missing or
    /// too old. `load` returns the host's load; it is called only for [`Metric::IdleProcessors`].
    pub(super) fn value_on(
        self,
        host: &HostView,
        now: Micros,
        load: impl Fn() -> HostLoad,
    ) -> Option<u64> {
        let recent_sample = || host.recent_sample(now);
        match self {
            Self::Memory => recent_sample().and_then(|_| host.available_bytes()),
            Self::Cores => recent_sample().map(|s| u64::from(s.sample.cores)),
            Self::Speed => Some(u64::try_from(host.speed).unwrap_or(0)),
            Self::IdleProcessors => recent_sample().map(|_| load().idle_percent()),
        }
    }

    /// Formats a value of this attribute: memory with a binary unit, idle processors as a fraction,
    /// other values as an integer.
    pub(super) fn format_value(self, value: u64) -> String {
        match self {
            Self::Memory => {
                let units = [
                    (1_u64 << 40, "T"),
                    (1 << 30, "G"),
                    (1 << 20, "M"),
                    (1 << 10, "K"),
                ];
                let unit = units.iter().find(|(unit_bytes, _)| value >= *unit_bytes);
                unit.map_or(value.to_string(), |(unit_bytes, name)| {
                    format!("{:.1}{name}", value as f64 / *unit_bytes as f64)
                })
            }
            Self::IdleProcessors => format!("{:.2}", value as f64 / 100.0),
            Self::Cores | Self::Speed => value.to_string(),
        }
    }

    fn parse_value(self, text: &str) -> Option<u64> {
        match self {
            Self::Memory => {
                let (digits, unit_shift) = split_memory_size(text)?;
                let value: f64 = digits
                    .parse()
                    .ok()
                    .filter(|v: &f64| v.is_finite() && *v >= 0.0)?;
                let bytes = value * (1_u64 << unit_shift) as f64;
                (bytes < u64::MAX as f64).then_some(bytes as u64)
            }
            Self::IdleProcessors => {
                let value: f64 = text
                    .parse()
                    .ok()
                    .filter(|v: &f64| v.is_finite() && (0.0..1e9).contains(v))?;
                Some((value * 100.0).round() as u64)
            }
            Self::Cores | Self::Speed => text.parse().ok(),
        }
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory",
            Self::Cores => "cores",
            Self::Speed => "speed",
            Self::IdleProcessors => "free",
        })
    }
}

impl fmt::Display for Attribute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Arch => f.write_str("arch"),
            Self::Metric(metric) => metric.fmt(f),
            Self::Label(label) => f.write_str(label),
        }
    }
}

impl Operator {
    /// Operators in the order in which the parser tries them. An operator that begins with a
    /// shorter operator comes before the shorter one.
    const ALL: [(&'static str, Self); 6] = [
        ("!=", Self::NoneOf),
        (">=", Self::AtLeast),
        ("<=", Self::AtMost),
        ("=", Self::OneOf),
        (">", Self::Above),
        ("<", Self::Below),
    ];

    fn is_ordering(self) -> bool {
        !matches!(self, Self::OneOf | Self::NoneOf)
    }

    fn holds<T: PartialOrd>(self, actual_value: &T, values: &[T]) -> bool {
        match self {
            Self::OneOf => values.contains(actual_value),
            Self::NoneOf => !values.contains(actual_value),
            Self::AtLeast => values.iter().all(|v| actual_value >= v),
            Self::AtMost => values.iter().all(|v| actual_value <= v),
            Self::Above => values.iter().all(|v| actual_value > v),
            Self::Below => values.iter().all(|v| actual_value < v),
        }
    }
}

impl fmt::Display for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            Self::ALL
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
            self.operator,
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
    /// Converts a borrowed text into an owned one.
    pub(super) fn into_owned(self) -> ActualValue {
        match self {
            ActualValue::Number(metric, value) => ActualValue::Number(metric, value),
            ActualValue::Text(text) => ActualValue::Text(text.into()),
            ActualValue::Unknown => ActualValue::Unknown,
            ActualValue::NoLabel => ActualValue::NoLabel,
        }
    }
}

impl<S: fmt::Display> fmt::Display for ActualValue<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(metric, value) => f.write_str(&metric.format_value(*value)),
            Self::Text(text) => text.fmt(f),
            Self::Unknown => f.write_str("unknown"),
            Self::NoLabel => f.write_str("no such label"),
        }
    }
}

/// Returns the host's actual value if the host does not meet the condition; `None` if the host
/// meets it.
fn actual_if_unmet<'a>(
    condition: &Condition,
    host: &'a HostView,
    now: Micros,
    load: impl Fn() -> HostLoad,
) -> Option<ActualValue<&'a str>> {
    let Condition {
        attribute: condition_attribute,
        operator: op,
        values,
        parsed_numbers: numbers,
    } = condition;
    let check_text = |actual_value: &'a String| {
        (!op.holds(actual_value, values)).then_some(ActualValue::Text(actual_value.as_str()))
    };
    match condition_attribute {
        Attribute::Host => check_text(&host.name),
        Attribute::Arch => check_text(&host.arch),
        Attribute::Metric(metric) => match metric.value_on(host, now, load) {
            None => Some(ActualValue::Unknown),
            Some(actual_value) => (!op.holds(&actual_value, numbers))
                .then_some(ActualValue::Number(*metric, actual_value)),
        },
        Attribute::Label(label) => match host.labels.get(label) {
            None => (*op != Operator::NoneOf).then_some(ActualValue::NoLabel),
            Some(actual_value) if op.is_ordering() => {
                match (actual_value.parse::<f64>(), values[0].parse::<f64>()) {
                    (Ok(actual_value), Ok(required_number))
                        if op.holds(&actual_value, &[required_number]) =>
                    {
                        None
                    }
                    _ => Some(ActualValue::Text(actual_value)),
                }
            }
            Some(actual_value) => check_text(actual_value),
        },
    }
}

impl Condition {
    fn parse(part: &str) -> Result<Self, ConstraintsError> {
        let operator_span = part.char_indices().find_map(|(operator_start, _)| {
            Operator::ALL
                .iter()
                .find(|(text, _)| part[operator_start..].starts_with(text))
                .map(|(text, op)| (operator_start, operator_start + text.len(), *op))
        });
        let invalid_part_error = || ConstraintsError::InvalidPart(part.to_string());
        let (end, value_start, op) = operator_span.ok_or_else(invalid_part_error)?;
        let (name, rest) = (part[..end].trim(), part[value_start..].trim());
        let is_name_char = |c: char| c.is_alphanumeric() || "_-.".contains(c);
        if name.is_empty() || !name.chars().all(is_name_char) {
            return Err(invalid_part_error());
        }
        let values: Vec<String> = rest.split('|').map(|v| v.trim().to_string()).collect();
        if values.iter().any(String::is_empty) || (op.is_ordering() && values.len() > 1) {
            return Err(invalid_part_error());
        }
        let parse_numbers = |metric: Metric| {
            let parse_number = |v: &String| {
                metric
                    .parse_value(v)
                    .ok_or_else(|| ConstraintsError::NotANumber {
                        name: name.to_string(),
                        value: v.clone(),
                    })
            };
            values
                .iter()
                .map(parse_number)
                .collect::<Result<Vec<u64>, ConstraintsError>>()
        };
        let (name, numbers) = match (name, Metric::from_name(name)) {
            ("host" | "arch", _) if op.is_ordering() => {
                return Err(ConstraintsError::NotOrdered(name.to_string()));
            }
            ("host", _) => (Attribute::Host, Vec::new()),
            ("arch", _) => (Attribute::Arch, Vec::new()),
            (_, Some(metric)) => (Attribute::Metric(metric), parse_numbers(metric)?),
            (label, None) => (Attribute::Label(label.to_string()), Vec::new()),
        };
        Ok(Self {
            attribute: name,
            operator: op,
            values,
            parsed_numbers: numbers,
        })
    }
}

/// Parses a number of seconds, or a number with the suffix `s`, `m` or `h`. A duration of more than
/// [`WORK_LEFT_MAX`] is reduced to this maximum. Returns `None` for anything but a positive finite
/// number.
fn parse_duration(text: &str) -> Option<Micros> {
    let units = [("h", 3600.0), ("m", 60.0), ("s", 1.0)];
    let unit = units
        .iter()
        .find_map(|(name, unit_seconds)| Some((text.strip_suffix(name)?, *unit_seconds)));
    let (digits, unit_seconds) = unit.unwrap_or((text, 1.0));
    let total_seconds = digits.trim().parse::<f64>().ok()? * unit_seconds;
    (total_seconds.is_finite() && total_seconds > 0.0)
        .then(|| Micros((total_seconds * 1e6) as u64).min(WORK_LEFT_MAX))
}

impl Constraints {
    /// Parses a constraints text.
    ///
    /// # Errors
    ///
    /// [`ConstraintsError`] if the text is too long or a part of it is invalid.
    pub fn parse(text: &str) -> Result<Self, ConstraintsError> {
        if text.len() > CONSTRAINTS_BYTES_MAX {
            return Err(ConstraintsError::TooLong);
        }
        let mut constraints = Self::default();
        for part in text
            .split([';', ','])
            .map(str::trim)
            .filter(|p| !p.is_empty())
        {
            let invalid_part_error = || ConstraintsError::InvalidPart(part.to_string());
            let (keyword, value) = part
                .split_once('=')
                .map_or((part, None), |(w, v)| (w.trim(), Some(v.trim())));
            match (keyword, value) {
                ("barrier", None) => constraints.barrier = true,
                ("same-host", None) => constraints.colocation = Colocation::SameHost,
                ("work", Some(work_text)) => {
                    constraints.work =
                        Some(parse_duration(work_text).ok_or_else(invalid_part_error)?)
                }
                ("spread", None) => constraints.colocation = Colocation::Spread(1),
                ("spread", Some(tasks_per_host)) => {
                    let tasks_per_host = tasks_per_host
                        .parse()
                        .ok()
                        .filter(|n| *n > 0)
                        .ok_or_else(invalid_part_error)?;
                    constraints.colocation = Colocation::Spread(tasks_per_host);
                }
                ("rank", Some(metric_name)) => {
                    let (smallest_first, metric_name) = metric_name
                        .strip_prefix('-')
                        .map_or((false, metric_name), |metric_name| {
                            (true, metric_name.trim())
                        });
                    constraints.rank = Some(Rank {
                        metric: Metric::from_name(metric_name).ok_or_else(invalid_part_error)?,
                        ascending: smallest_first,
                    });
                }
                _ => constraints
                    .conditions
                    .push(Arc::new(Condition::parse(part)?)),
            }
        }
        Ok(constraints)
    }

    /// Returns the constraints of a spawn, combined from its environment and its `where` argument.
    ///
    /// # Errors
    /// [`ConstraintsError`] if one of the texts is invalid.
    pub fn from_request(request: &SpawnRequest) -> Result<Self, ConstraintsError> {
        let parse_env_entry = |entry: &Vec<u8>| {
            let text = std::str::from_utf8(entry).ok()?;
            text.strip_prefix(CONSTRAINTS_ENV)?
                .strip_prefix('=')
                .map(Self::parse)
        };
        // If the environment contains the variable twice, the last entry counts, as for the spawned
        // program.
        let mut combined_constraints = request
            .env
            .iter()
            .rev()
            .find_map(parse_env_entry)
            .transpose()?
            .unwrap_or_default();
        let where_text = request.where_arg.split(':').next().unwrap_or_default();
        if let Some(text) = where_text
            .strip_prefix('?')
            .filter(|_| request.flags & (SPAWN_HOST | SPAWN_ARCH) == 0)
        {
            let where_constraints = Self::parse(text)?;
            combined_constraints
                .conditions
                .extend(where_constraints.conditions);
            combined_constraints.rank = where_constraints.rank.or(combined_constraints.rank);
            combined_constraints.barrier |= where_constraints.barrier;
            combined_constraints.work = where_constraints.work.or(combined_constraints.work);
            if where_constraints.colocation != Colocation::Any {
                combined_constraints.colocation = where_constraints.colocation;
            }
        }
        Ok(combined_constraints)
    }

    /// Returns the first condition that the host does not meet at `now`, with the host's actual
    /// value. Returns `None` if the host meets all conditions.
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

    /// True if at least one condition can never hold on the host, even if no task runs there.
    /// Conditions on memory and idle processors are not examined, because their values change when
    /// tasks leave the host.
    pub(super) fn is_never_met(&self, host: &HostView, now: Micros) -> bool {
        let is_task_independent = |c: &&Arc<Condition>| {
            !matches!(
                c.attribute,
                Attribute::Metric(Metric::Memory | Metric::IdleProcessors)
            )
        };
        let no_load = || unreachable!("only free processors depend on the load");
        self.conditions
            .iter()
            .filter(is_task_independent)
            .any(|c| actual_if_unmet(c, host, now, no_load).is_some())
    }

    /// Returns the memory in bytes that each task needs: the largest minimum in the conditions.
    /// `None` if no condition states a minimum.
    pub fn min_memory_bytes(&self) -> Option<u64> {
        let memory_conditions = self
            .conditions
            .iter()
            .filter(|c| c.attribute == Attribute::Metric(Metric::Memory));
        memory_conditions
            .filter(|c| matches!(c.operator, Operator::AtLeast | Operator::Above))
            .filter_map(|c| c.parsed_numbers.first().copied())
            .max()
    }

    /// Returns how many tasks of this spawn the host can accept: at most the number of tasks per
    /// host that `spread` allows, and at most the number for which the host has memory at `now`. If
    /// the conditions state no minimum memory, memory is no limit. Unknown memory counts as 0.
    pub(super) fn task_capacity(&self, host: &HostView, now: Micros) -> u32 {
        let spread = match self.colocation {
            Colocation::Spread(tasks_per_host) => tasks_per_host,
            Colocation::Any | Colocation::SameHost => u32::MAX,
        };
        let available_memory_bytes = host
            .recent_sample(now)
            .and_then(|_| host.available_bytes())
            .unwrap_or(0);
        let memory_slots = self
            .min_memory_bytes()
            .and_then(|bytes| available_memory_bytes.checked_div(bytes))
            .unwrap_or(u64::MAX);
        spread.min(u32::try_from(memory_slots).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A text is parsed into conditions, rank, spread and declared work.
    #[test]
    fn parses_conditions_rank_and_spread() {
        let constraints =
            Constraints::parse(" memory >= 1.5G ,arch=LINUX64|LINUX; host != h3 | h4;disk = ssd; spread=2; rank = -speed")
                .expect("good");
        let formatted_conditions: Vec<String> = constraints
            .conditions
            .iter()
            .map(|c| c.to_string())
            .collect();
        assert_eq!(
            formatted_conditions,
            [
                "memory >= 1.5G",
                "arch = LINUX64|LINUX",
                "host != h3|h4",
                "disk = ssd"
            ]
        );
        assert_eq!(constraints.conditions[0].parsed_numbers, [3 << 29]);
        assert_eq!(
            constraints.conditions[3].attribute,
            Attribute::Label("disk".into())
        );
        assert_eq!(
            (constraints.colocation, constraints.rank),
            (
                Colocation::Spread(2),
                Some(Rank {
                    metric: Metric::Speed,
                    ascending: true
                })
            )
        );
        assert_eq!(
            Constraints::parse(" ;, ").expect("nothing is asked"),
            Constraints::default()
        );
        let declared_work = |text: &str| Constraints::parse(text).expect("good").work;
        assert_eq!(
            (
                declared_work("work = 90"),
                declared_work("spread; work=1.5 m")
            ),
            (Some(Micros::from_secs(90)), Some(Micros::from_secs(90)))
        );
        assert_eq!(
            (declared_work("work = 1000h"), declared_work("barrier")),
            (Some(WORK_LEFT_MAX), None)
        );
        assert_eq!(
            Constraints::parse("free>=0.5").expect("good").conditions[0].parsed_numbers,
            [50]
        );
    }

    /// The error of an invalid text names the invalid part. A text that is too long is refused.
    #[test]
    fn parse_error_names_invalid_part() {
        for (text, expected_message) in [
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
            assert!(error.contains(expected_message), "{text}: {error}");
        }
        assert_eq!(
            Constraints::parse(&"x".repeat(5000)),
            Err(ConstraintsError::TooLong)
        );
    }

    /// Conditions of `where` and of the environment are combined. If a flag gives `where` another
    /// meaning, or if `where` has no question mark, `where` is not parsed.
    #[test]
    fn constraints_come_from_where_and_environment() {
        let env = vec![b"SEMPA_WANTS=cores >= 4; rank = speed".to_vec()];
        let request = |flags, where_text: &str| SpawnRequest {
            flags,
            where_arg: where_text.into(),
            env: env.clone(),
            ..SpawnRequest::default()
        };
        let combined_constraints =
            Constraints::from_request(&request(0, "?memory >= 1G; rank = memory:/tmp"))
                .expect("good");
        assert_eq!(combined_constraints.conditions.len(), 2);
        assert_eq!(
            combined_constraints.rank,
            Some(Rank {
                metric: Metric::Memory,
                ascending: false
            })
        );
        for (flags, where_text) in [
            (SPAWN_HOST, "?memory >= 1G"),
            (SPAWN_ARCH, "?x"),
            (0, "anything"),
            (0, ""),
        ] {
            assert_eq!(
                Constraints::from_request(&request(flags, where_text))
                    .expect("good")
                    .conditions
                    .len(),
                1,
                "{where_text}"
            );
        }
    }

    proptest! {
        /// Any text is parsed without a panic. The text of a formatted condition parses to the same
        /// condition.
        #[test]
        fn any_text_parses_safely_and_round_trips(text in "[a-z0-9 =!<>|;,.?GM-]{0,60}|.{0,40}") {
            if let Ok(constraints) = Constraints::parse(&text) {
                for condition in &constraints.conditions {
                    prop_assert_eq!(&Condition::parse(&condition.to_string())?, condition.as_ref());
                }
            }
        }
    }
}
