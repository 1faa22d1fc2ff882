//! The policy of the resource manager, and its file format.
//!
//! ```toml
//! placing = "load"      # or "round-robin", or "choice:NAME"
//! balance = true        # move tasks to where they finish sooner
//! margin = 1.5          # what such a move must save, as a multiple of what it costs
//! wait_s = 60           # how long a spawn may wait for a free host
//! user_tasks = 100      # tasks of a user at once
//! job_tasks = 50        # tasks of a job at once
//! give_way = true       # suspend tasks of heavy users while a spawn of a light user waits
//! ```
//!
//! A key that the file does not contain has the value from the command line.

use crate::decide::{CHOOSER_NAME_MAX, ChooserName, GAIN_MARGIN, PlacementPolicy, TaskLimits};
use crate::spawns::SpawnRules;
use sempa_proto::Micros;
use sempa_proto::text::line_number;
use serde::{Deserialize, Serialize};
use std::fmt;
use thiserror::Error;

/// Maximum size of a policy file in bytes.
pub const POLICY_BYTES_MAX: usize = 64 << 10;
/// Maximum waiting time of a spawn, in seconds: a week.
pub const WAIT_S_MAX: u64 = 604_800;
/// Range of values that the policy file may set for the margin.
const VALID_MARGINS: std::ops::RangeInclusive<f64> = 1.0..=100.0;

/// The policy in force.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EffectivePolicy {
    /// How new tasks are distributed over the hosts.
    pub placement: PlacementPolicy,
    /// True if tasks are migrated to hosts where they finish sooner.
    pub rebalances: bool,
    /// Minimum gain of a rebalancing migration, as a multiple of its cost.
    pub gain_margin: f64,
    pub spawn_rules: SpawnRules,
    /// True if tasks of users with a high Up-Down index (much processor time recently) are
    /// suspended while a request of a user with a low index waits.
    pub preempts: bool,
}

impl Default for EffectivePolicy {
    fn default() -> Self {
        Self {
            placement: PlacementPolicy::default(),
            rebalances: false,
            gain_margin: GAIN_MARGIN,
            spawn_rules: SpawnRules::default(),
            preempts: true,
        }
    }
}

impl fmt::Display for EffectivePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SpawnRules {
            wait_max: wait,
            task_limits: limits,
        } = self.spawn_rules;
        write!(
            f,
            "placing {}, balance {}",
            self.placement,
            if self.rebalances { "on" } else { "off" }
        )?;
        write!(
            f,
            ", margin {}, wait {} s",
            self.gain_margin,
            wait.0 / 1_000_000
        )?;
        let limit_text =
            |n: Option<u32>| n.map_or_else(|| "no limit".to_string(), |n| n.to_string());
        write!(
            f,
            ", tasks of a user {}, of a job {}",
            limit_text(limits.user_tasks_max),
            limit_text(limits.job_tasks_max)
        )?;
        write!(
            f,
            ", preemption {}",
            if self.preempts { "on" } else { "off" }
        )
    }
}

/// Error in a policy file.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{file}, line {line}: {why}")]
pub struct PolicyError {
    /// Name of the file as it was given on the command line.
    pub file: String,
    /// Line number, starting at 1.
    pub line: usize,
    pub why: String,
}

/// Prefix of a placement policy that names an external chooser.
const CHOOSER_PREFIX: &str = "choice:";

/// Error in the name of a placement policy. The policy in force is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PlacementNameError {
    /// The contained text names no placement policy. The policy in force is unchanged.
    #[error("{0:?} is not one of load, round-robin and {CHOOSER_PREFIX}NAME")]
    UnknownName(String),
    /// The contained text after `choice:` cannot be the name of a chooser. The policy in force is
    /// unchanged.
    #[error(
        "{0:?} is not the name of a chooser: use up to {CHOOSER_NAME_MAX} letters, digits, '-' and '_'"
    )]
    InvalidChooserName(String),
}

/// Parses the name of a placement policy: `load`, `round-robin`, or `choice:NAME`.
///
/// # Errors
///
/// The text is neither one of these names nor the valid name of a chooser.
pub fn parse_placement(name: &str) -> Result<PlacementPolicy, PlacementNameError> {
    match (name, name.strip_prefix(CHOOSER_PREFIX)) {
        ("load", _) => Ok(PlacementPolicy::Load),
        ("round-robin", _) => Ok(PlacementPolicy::RoundRobin),
        (_, Some(chooser_name)) => ChooserName::new(chooser_name)
            .map(PlacementPolicy::Chooser)
            .ok_or_else(|| PlacementNameError::InvalidChooserName(chooser_name.to_string())),
        _ => Err(PlacementNameError::UnknownName(name.to_string())),
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyFile {
    placing: Option<toml::Spanned<String>>,
    balance: Option<bool>,
    margin: Option<toml::Spanned<f64>>,
    wait_s: Option<toml::Spanned<u64>>,
    user_tasks: Option<u32>,
    job_tasks: Option<u32>,
    give_way: Option<bool>,
}

impl EffectivePolicy {
    /// Returns this policy with the settings of a file applied. `file`: name of the file, for
    /// errors.
    ///
    /// # Errors
    ///
    /// The first error in the file, with its line. In this case no setting of the file is applied.
    pub fn with_file(self, file: &str, content: impl AsRef<[u8]>) -> Result<Self, PolicyError> {
        let content = content.as_ref();
        let (text, is_text) = match std::str::from_utf8(content) {
            Ok(text) => (text, true),
            // The text before the invalid byte determines the line number.
            Err(error) => (
                std::str::from_utf8(&content[..error.valid_up_to()]).unwrap_or_default(),
                false,
            ),
        };
        let error_at = |offset: usize, why: String| PolicyError {
            file: file.to_string(),
            line: line_number(text, offset),
            why,
        };
        if content.len() > POLICY_BYTES_MAX {
            return Err(error_at(
                0,
                format!("the file has more than the {POLICY_BYTES_MAX} bytes that are allowed"),
            ));
        }
        if !is_text {
            return Err(error_at(text.len(), "this is not UTF-8 text".into()));
        }
        let parsed_file = toml::from_str::<PolicyFile>(text).map_err(|error| {
            error_at(
                error.span().map_or(0, |span| span.start),
                error.message().trim().to_string(),
            )
        })?;
        let mut policy = self;
        if let Some(margin) = parsed_file.margin {
            if !VALID_MARGINS.contains(margin.get_ref()) {
                let (margin_min, margin_max) = (VALID_MARGINS.start(), VALID_MARGINS.end());
                return Err(error_at(
                    margin.span().start,
                    format!("margin must be {margin_min} to {margin_max}"),
                ));
            }
            policy.gain_margin = margin.into_inner();
        }
        if let Some(wait) = parsed_file.wait_s {
            if *wait.get_ref() > WAIT_S_MAX {
                return Err(error_at(
                    wait.span().start,
                    format!("wait_s must be at most {WAIT_S_MAX}"),
                ));
            }
            policy.spawn_rules.wait_max = Micros::from_secs(wait.into_inner());
        }
        if let Some(name) = parsed_file.placing {
            policy.placement = parse_placement(name.get_ref())
                .map_err(|error| error_at(name.span().start, error.to_string()))?;
        }
        policy.rebalances = parsed_file.balance.unwrap_or(policy.rebalances);
        policy.preempts = parsed_file.give_way.unwrap_or(policy.preempts);
        let TaskLimits {
            user_tasks_max: user_tasks,
            job_tasks_max: job_tasks,
        } = policy.spawn_rules.task_limits;
        policy.spawn_rules.task_limits = TaskLimits {
            user_tasks_max: parsed_file.user_tasks.or(user_tasks),
            job_tasks_max: parsed_file.job_tasks.or(job_tasks),
        };
        Ok(policy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply_text(text: &str) -> Result<EffectivePolicy, PolicyError> {
        EffectivePolicy::default().with_file("rm.toml", text)
    }

    /// Settings that the policy file does not contain keep their previous values.
    #[test]
    fn file_changes_only_the_keys_it_names() {
        let rules = SpawnRules {
            wait_max: Micros::from_secs(5),
            task_limits: TaskLimits {
                user_tasks_max: Some(3),
                job_tasks_max: None,
            },
        };
        let command_line_policy = EffectivePolicy {
            rebalances: true,
            spawn_rules: rules,
            ..EffectivePolicy::default()
        };
        assert_eq!(
            command_line_policy.with_file("f", ""),
            Ok(command_line_policy)
        );
        let text = "placing = \"round-robin\"\nmargin = 2 # twice\njob_tasks = 4\n";
        let limits = TaskLimits {
            user_tasks_max: Some(3),
            job_tasks_max: Some(4),
        };
        let rules = SpawnRules {
            task_limits: limits,
            ..rules
        };
        let expected_policy = EffectivePolicy {
            placement: PlacementPolicy::RoundRobin,
            gain_margin: 2.0,
            spawn_rules: rules,
            ..command_line_policy
        };
        assert_eq!(
            command_line_policy.with_file("f", text.replace("= 2 ", "= 2.0 ")),
            Ok(expected_policy)
        );
    }

    /// A file that is not UTF-8 is refused, with the line of the first invalid byte.
    #[test]
    fn binary_file_is_refused_with_its_line() {
        let error = EffectivePolicy::default()
            .with_file("rm.toml", b"wait_s = 1\n# caf\xe9\n")
            .expect_err("Latin-1");
        assert_eq!(error.to_string(), "rm.toml, line 2: this is not UTF-8 text");
    }

    /// Each error in a policy file is reported with its line.
    #[test]
    fn errors_name_the_line() {
        for (text, expected_start) in [
            (
                "balance = true\n\nplacing = \"best\"\n",
                "rm.toml, line 3: \"best\" is not one of load, round-robin and choice:NAME",
            ),
            (
                "placing = \"choice:a b\"",
                "rm.toml, line 1: \"a b\" is not the name of a chooser",
            ),
            (
                "balance = true\nballance = true\n",
                "rm.toml, line 2: unknown field `ballance`",
            ),
            (
                "\nmargin = 0.5\n",
                "rm.toml, line 2: margin must be 1 to 100",
            ),
            ("margin = nan\n", "rm.toml, line 1: margin must be 1 to 100"),
            (
                "wait_s = 604801",
                "rm.toml, line 1: wait_s must be at most 604800",
            ),
            ("user_tasks = -1", "rm.toml, line 1: invalid value"),
            (
                "user_tasks = 1\nuser_tasks = 2\n",
                "rm.toml, line 2: duplicate key",
            ),
            ("= 1", "rm.toml, line 1: "),
            (
                &format!("# {}", "x".repeat(POLICY_BYTES_MAX)),
                "rm.toml, line 1: the file has more than the 65536 bytes",
            ),
        ] {
            let error = apply_text(text).expect_err(text).to_string();
            assert!(error.starts_with(expected_start), "{error}");
            assert!(!error.contains('\n'), "{error:?}");
        }
    }
}
