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
//! another meaning, or in its environment as [`CONSTRAINTS_ENV`]. If both are present, both must hold.
//! The text contains no colon, because in `where` a directory follows the first colon.

use super::HostView;
use super::load::Load;
use super::predict::LEFT_MAX;
use sempa_proto::Micros;
pub use sempa_proto::job::CONSTRAINTS_ENV;
use sempa_proto::task::{SPAWN_ARCH, SPAWN_HOST, SpawnRequest};
use sempa_proto::text::split_memory_size;
use std::fmt;
use std::sync::Arc;
use thiserror::Error;

/// Maximum length of a constraints text, in bytes.
pub const WANTS_BYTES_MAX: usize = 4096;

/// Host attribute that a condition compares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Name {
    Host,
    Arch,
    Figure(Figure),
    /// Label that the administrator gave the host.
    Label(String),
}

/// Numeric attribute of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
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
pub enum Op {
    /// Equal to one of the values.
    Is,
    /// Equal to none of the values.
    IsNot,
    AtLeast,
    AtMost,
    Above,
    Below,
}

/// One condition of a spawn; all of them must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    pub name: Name,
    pub op: Op,
    /// Right-hand sides as written. More than one is possible only with [`Op::Is`] and
    /// [`Op::IsNot`].
    pub values: Vec<String>,
    /// The parsed `values` if the attribute is numeric.
    numbers: Vec<u64>,
}

/// How many tasks of one spawn may share a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Together {
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
    pub by: Figure,
    /// Prefer the smallest value instead of the largest.
    pub least: bool,
}

/// Constraints and preferences of a spawn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    pub conditions: Vec<Arc<Condition>>,
    pub together: Together,
    /// Preferred order; without one, hosts are chosen by load.
    pub rank: Option<Rank>,
    /// The tasks of the job wait for each other at barriers: the job is as fast as its slowest
    /// task.
    pub barrier: bool,
    /// Work of each task as declared by the program, in time of an ordinary processor.
    pub work: Option<Micros>,
}

/// Error of an invalid text; none of the tasks is placed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum WantsError {
    /// Neither a condition nor a keyword.
    #[error("{0:?} is not a requirement; examples: 'memory >= 2G', 'host != h3|h4'")]
    Part(String),
    /// A numeric attribute is compared with something that is not a number.
    #[error("{value:?} is not a number for {name}")]
    Number { name: String, value: String },
    /// `host` and `arch` support only equality.
    #[error("{0} can only be compared with '=' or '!='")]
    NoOrder(String),
    #[error("the requirements are longer than {WANTS_BYTES_MAX} bytes")]
    TooLong,
}

impl Figure {
    fn named(name: &str) -> Option<Figure> {
        Some(match name {
            "memory" => Figure::Memory,
            "cores" => Figure::Cores,
            "speed" => Figure::Speed,
            "free" => Figure::Free,
            _ => return None,
        })
    }

    /// Returns the value for a host at `now`; `None` if the sample is missing or too old. `load` is
    /// called only for [`Figure::Free`].
    pub(super) fn of(self, host: &HostView, now: Micros, load: impl Fn() -> Load) -> Option<u64> {
        let fresh = || host.fresh_sample(now);
        match self {
            Figure::Memory => fresh().and_then(|_| host.available_bytes()),
            Figure::Cores => fresh().map(|s| u64::from(s.sample.cores)),
            Figure::Speed => Some(u64::try_from(host.speed).unwrap_or(0)),
            Figure::Free => fresh().map(|_| load().free_percent()),
        }
    }

    /// Formats a value in a readable unit.
    pub(super) fn text(self, value: u64) -> String {
        match self {
            Figure::Memory => {
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
            Figure::Free => format!("{:.2}", value as f64 / 100.0),
            Figure::Cores | Figure::Speed => value.to_string(),
        }
    }

    fn number(self, text: &str) -> Option<u64> {
        match self {
            Figure::Memory => {
                let (digits, shift) = split_memory_size(text)?;
                let value: f64 = digits
                    .parse()
                    .ok()
                    .filter(|v: &f64| v.is_finite() && *v >= 0.0)?;
                let bytes = value * (1_u64 << shift) as f64;
                (bytes < u64::MAX as f64).then_some(bytes as u64)
            }
            Figure::Free => {
                let value: f64 = text
                    .parse()
                    .ok()
                    .filter(|v: &f64| v.is_finite() && (0.0..1e9).contains(v))?;
                Some((value * 100.0).round() as u64)
            }
            Figure::Cores | Figure::Speed => text.parse().ok(),
        }
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Figure::Memory => "memory",
            Figure::Cores => "cores",
            Figure::Speed => "speed",
            Figure::Free => "free",
        })
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Name::Host => f.write_str("host"),
            Name::Arch => f.write_str("arch"),
            Name::Figure(figure) => figure.fmt(f),
            Name::Label(label) => f.write_str(label),
        }
    }
}

impl Op {
    /// Longer operators first, because shorter ones are their prefixes.
    const ALL: [(&'static str, Op); 6] = [
        ("!=", Op::IsNot),
        (">=", Op::AtLeast),
        ("<=", Op::AtMost),
        ("=", Op::Is),
        (">", Op::Above),
        ("<", Op::Below),
    ];

    fn has_order(self) -> bool {
        !matches!(self, Op::Is | Op::IsNot)
    }

    fn holds<T: PartialOrd>(self, has: &T, values: &[T]) -> bool {
        match self {
            Op::Is => values.contains(has),
            Op::IsNot => !values.contains(has),
            Op::AtLeast => values.iter().all(|v| has >= v),
            Op::AtMost => values.iter().all(|v| has <= v),
            Op::Above => values.iter().all(|v| has > v),
            Op::Below => values.iter().all(|v| has < v),
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            Op::ALL
                .iter()
                .find(|(_, op)| op == self)
                .map_or("", |(text, _)| text),
        )
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.name, self.op, self.values.join("|"))
    }
}

/// Actual value of a host that does not meet a condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Has<S = String> {
    Number(Figure, u64),
    /// A name, architecture or label.
    Text(S),
    /// The host has not reported the value, or its sample is too old.
    Unknown,
    /// The host has no such label.
    NoLabel,
}

impl Has<&str> {
    /// Converts borrowed text to owned text.
    pub(super) fn own(self) -> Has {
        match self {
            Has::Number(figure, value) => Has::Number(figure, value),
            Has::Text(text) => Has::Text(text.into()),
            Has::Unknown => Has::Unknown,
            Has::NoLabel => Has::NoLabel,
        }
    }
}

impl<S: fmt::Display> fmt::Display for Has<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Has::Number(figure, value) => f.write_str(&figure.text(*value)),
            Has::Text(text) => text.fmt(f),
            Has::Unknown => f.write_str("unknown"),
            Has::NoLabel => f.write_str("no such label"),
        }
    }
}

/// Returns the host's actual value if the condition does not hold, else `None`.
fn lacks<'a>(
    condition: &Condition,
    host: &'a HostView,
    now: Micros,
    load: impl Fn() -> Load,
) -> Option<Has<&'a str>> {
    let Condition {
        name,
        op,
        values,
        numbers,
    } = condition;
    let text = |has: &'a String| (!op.holds(has, values)).then_some(Has::Text(has.as_str()));
    match name {
        Name::Host => text(&host.name),
        Name::Arch => text(&host.arch),
        Name::Figure(figure) => match figure.of(host, now, load) {
            None => Some(Has::Unknown),
            Some(has) => (!op.holds(&has, numbers)).then_some(Has::Number(*figure, has)),
        },
        Name::Label(label) => match host.labels.get(label) {
            None => (*op != Op::IsNot).then_some(Has::NoLabel),
            Some(has) if op.has_order() => match (has.parse::<f64>(), values[0].parse::<f64>()) {
                (Ok(has), Ok(wanted)) if op.holds(&has, &[wanted]) => None,
                _ => Some(Has::Text(has)),
            },
            Some(has) => text(has),
        },
    }
}

impl Condition {
    fn parse(part: &str) -> Result<Condition, WantsError> {
        let found = part.char_indices().find_map(|(at, _)| {
            Op::ALL
                .iter()
                .find(|(text, _)| part[at..].starts_with(text))
                .map(|(text, op)| (at, at + text.len(), *op))
        });
        let wrong = || WantsError::Part(part.to_string());
        let (end, begin, op) = found.ok_or_else(wrong)?;
        let (name, rest) = (part[..end].trim(), part[begin..].trim());
        let is_word = |c: char| c.is_alphanumeric() || "_-.".contains(c);
        if name.is_empty() || !name.chars().all(is_word) {
            return Err(wrong());
        }
        let values: Vec<String> = rest.split('|').map(|v| v.trim().to_string()).collect();
        if values.iter().any(String::is_empty) || (op.has_order() && values.len() > 1) {
            return Err(wrong());
        }
        let number = |figure: Figure| {
            let one = |v: &String| {
                figure.number(v).ok_or_else(|| WantsError::Number {
                    name: name.to_string(),
                    value: v.clone(),
                })
            };
            values
                .iter()
                .map(one)
                .collect::<Result<Vec<u64>, WantsError>>()
        };
        let (name, numbers) = match (name, Figure::named(name)) {
            ("host" | "arch", _) if op.has_order() => {
                return Err(WantsError::NoOrder(name.to_string()));
            }
            ("host", _) => (Name::Host, Vec::new()),
            ("arch", _) => (Name::Arch, Vec::new()),
            (_, Some(figure)) => (Name::Figure(figure), number(figure)?),
            (label, None) => (Name::Label(label.to_string()), Vec::new()),
        };
        Ok(Condition {
            name,
            op,
            values,
            numbers,
        })
    }
}

/// Parses a duration: seconds, or a number with the suffix `s`, `m` or `h`. Limited to
/// [`LEFT_MAX`].
fn work(text: &str) -> Option<Micros> {
    let units = [("h", 3600.0), ("m", 60.0), ("s", 1.0)];
    let unit = units
        .iter()
        .find_map(|(name, seconds)| Some((text.strip_suffix(name)?, *seconds)));
    let (digits, seconds) = unit.unwrap_or((text, 1.0));
    let span = digits.trim().parse::<f64>().ok()? * seconds;
    (span.is_finite() && span > 0.0).then(|| Micros((span * 1e6) as u64).min(LEFT_MAX))
}

impl Wants {
    /// Parses a constraints text.
    ///
    /// # Errors
    /// [`WantsError`] names the invalid part.
    pub fn parse(text: &str) -> Result<Wants, WantsError> {
        if text.len() > WANTS_BYTES_MAX {
            return Err(WantsError::TooLong);
        }
        let mut wants = Wants::default();
        for part in text
            .split([';', ','])
            .map(str::trim)
            .filter(|p| !p.is_empty())
        {
            let wrong = || WantsError::Part(part.to_string());
            let (word, value) = part
                .split_once('=')
                .map_or((part, None), |(w, v)| (w.trim(), Some(v.trim())));
            match (word, value) {
                ("barrier", None) => wants.barrier = true,
                ("same-host", None) => wants.together = Together::SameHost,
                ("work", Some(span)) => wants.work = Some(work(span).ok_or_else(wrong)?),
                ("spread", None) => wants.together = Together::Spread(1),
                ("spread", Some(most)) => {
                    let most = most.parse().ok().filter(|n| *n > 0).ok_or_else(wrong)?;
                    wants.together = Together::Spread(most);
                }
                ("rank", Some(by)) => {
                    let (least, by) = by
                        .strip_prefix('-')
                        .map_or((false, by), |by| (true, by.trim()));
                    wants.rank = Some(Rank {
                        by: Figure::named(by).ok_or_else(wrong)?,
                        least,
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
    /// [`WantsError`] if one of the texts is invalid.
    pub fn of(request: &SpawnRequest) -> Result<Wants, WantsError> {
        let of_env = |entry: &Vec<u8>| {
            let text = std::str::from_utf8(entry).ok()?;
            text.strip_prefix(CONSTRAINTS_ENV)?
                .strip_prefix('=')
                .map(Wants::parse)
        };
        // Of duplicate entries the last one counts, as it does for the program.
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
            let more = Wants::parse(text)?;
            wants.conditions.extend(more.conditions);
            wants.rank = more.rank.or(wants.rank);
            wants.barrier |= more.barrier;
            wants.work = more.work.or(wants.work);
            if more.together != Together::Any {
                wants.together = more.together;
            }
        }
        Ok(wants)
    }

    /// Returns the first condition that the host does not meet at `now`, with the host's actual
    /// value.
    pub(super) fn unmet<'a>(
        &self,
        host: &'a HostView,
        now: Micros,
        load: impl Fn() -> Load,
    ) -> Option<(Arc<Condition>, Has<&'a str>)> {
        self.conditions
            .iter()
            .find_map(|c| Some((c.clone(), lacks(c, host, now, &load)?)))
    }

    /// True if the host cannot meet the conditions even without any task. Conditions on memory and
    /// idle processors are ignored, because tasks that leave change these values.
    pub(super) fn is_never_met(&self, host: &HostView, now: Micros) -> bool {
        let passes =
            |c: &&Arc<Condition>| !matches!(c.name, Name::Figure(Figure::Memory | Figure::Free));
        let no_load = || unreachable!("only free processors depend on the load");
        self.conditions
            .iter()
            .filter(passes)
            .any(|c| lacks(c, host, now, no_load).is_some())
    }

    /// Returns the bytes that each task needs, if the constraints state a lower bound.
    pub fn memory(&self) -> Option<u64> {
        let wanted = self
            .conditions
            .iter()
            .filter(|c| c.name == Name::Figure(Figure::Memory));
        wanted
            .filter(|c| matches!(c.op, Op::AtLeast | Op::Above))
            .filter_map(|c| c.numbers.first().copied())
            .max()
    }

    /// Returns how many tasks of this spawn the host can take at `now`, by memory and by the
    /// spread.
    pub(super) fn capacity(&self, host: &HostView, now: Micros) -> u32 {
        let spread = match self.together {
            Together::Spread(most) => most,
            Together::Any | Together::SameHost => u32::MAX,
        };
        let available = host
            .fresh_sample(now)
            .and_then(|_| host.available_bytes())
            .unwrap_or(0);
        let by_memory = self
            .memory()
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
            Wants::parse(" memory >= 1.5G ,arch=LINUX64|LINUX; host != h3 | h4;disk = ssd; spread=2; rank = -speed")
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
        assert_eq!(wants.conditions[3].name, Name::Label("disk".into()));
        assert_eq!(
            (wants.together, wants.rank),
            (
                Together::Spread(2),
                Some(Rank {
                    by: Figure::Speed,
                    least: true
                })
            )
        );
        assert_eq!(
            Wants::parse(" ;, ").expect("nothing is asked"),
            Wants::default()
        );
        let work = |text: &str| Wants::parse(text).expect("good").work;
        assert_eq!(
            (work("work = 90"), work("spread; work=1.5 m")),
            (Some(Micros::from_secs(90)), Some(Micros::from_secs(90)))
        );
        assert_eq!(
            (work("work = 1000h"), work("barrier")),
            (Some(LEFT_MAX), None)
        );
        assert_eq!(
            Wants::parse("free>=0.5").expect("good").conditions[0].numbers,
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
            let error = Wants::parse(text).expect_err(text).to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
        assert_eq!(Wants::parse(&"x".repeat(5000)), Err(WantsError::TooLong));
    }

    /// Constraints come from `where` and from the environment; flags keep their meaning.
    #[test]
    fn constraints_come_from_where_and_environment() {
        let env = vec![b"SEMPA_WANTS=cores >= 4; rank = speed".to_vec()];
        let request = |flags, place: &str| SpawnRequest {
            flags,
            place: place.into(),
            env: env.clone(),
            ..SpawnRequest::default()
        };
        let both = Wants::of(&request(0, "?memory >= 1G; rank = memory:/tmp")).expect("good");
        assert_eq!(both.conditions.len(), 2);
        assert_eq!(
            both.rank,
            Some(Rank {
                by: Figure::Memory,
                least: false
            })
        );
        for (flags, place) in [
            (SPAWN_HOST, "?memory >= 1G"),
            (SPAWN_ARCH, "?x"),
            (0, "anything"),
            (0, ""),
        ] {
            assert_eq!(
                Wants::of(&request(flags, place))
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
            if let Ok(wants) = Wants::parse(&text) {
                for condition in &wants.conditions {
                    prop_assert_eq!(&Condition::parse(&condition.to_string())?, condition.as_ref());
                }
            }
        }
    }
}
