//! External choosers: a batch system that has reserved hosts, or any other rule, selects hosts for
//! spawns.
//!
//! The resource manager checks each choice and explains it like its own decisions. The policy names
//! the chooser ([`super::Policy::Choice`]).

use super::{HostView, Policy, Share};
use sempa_proto::task::SpawnRequest;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;
use thiserror::Error;

/// A host that fits a request.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    pub host: &'a HostView,
    /// Processor share that one more task would get.
    pub share: Share,
    /// Maximum number of tasks that the host can take.
    pub capacity: u32,
}

/// Selects hosts for spawns in place of the built-in policies.
pub trait Choice {
    /// Returns the name that policies and explanations use.
    fn name(&self) -> &str;
    /// Returns hosts for the tasks of one spawn, as indices into `offers`: one per task, in task
    /// order. If there are fewer than `count`, the last tasks get no host.
    ///
    /// # Errors
    /// Why no host was chosen; the tasks are not placed.
    fn choose(
        &self,
        request: &SpawnRequest,
        offers: &[Offer<'_>],
        count: usize,
    ) -> Result<Vec<usize>, String>;
}

/// Name of a chooser in a policy.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChoiceName([u8; CHOICE_NAME_MAX]);

/// Maximum length of a chooser's name, in bytes.
pub const CHOICE_NAME_MAX: usize = 32;

impl ChoiceName {
    /// Returns `None` unless the name consists of 1 to [`CHOICE_NAME_MAX`] letters, digits, `-` and
    /// `_`.
    pub fn new(name: &str) -> Option<ChoiceName> {
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        if name.is_empty() || name.len() > CHOICE_NAME_MAX || !name.bytes().all(is_word) {
            return None;
        }
        let mut bytes = [0; CHOICE_NAME_MAX];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        Some(ChoiceName(bytes))
    }

    pub fn as_str(&self) -> &str {
        let end = self
            .0
            .iter()
            .position(|byte| *byte == 0)
            .unwrap_or(CHOICE_NAME_MAX);
        std::str::from_utf8(&self.0[..end]).unwrap_or_default()
    }
}

impl fmt::Debug for ChoiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The policy names a chooser that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "the policy names the chooser {name:?}, but {there}: use load or round-robin, or a pvm-rm that has it"
)]
pub struct NoSuchChoice {
    pub name: String,
    /// Text that lists the available choosers.
    pub there: String,
}

/// Choosers available to the resource manager.
#[derive(Clone, Default)]
pub struct Choices(Vec<Arc<dyn Choice>>);

impl Choices {
    /// Of choosers with equal names the first one counts.
    pub fn new(choices: impl IntoIterator<Item = Arc<dyn Choice>>) -> Choices {
        Choices(choices.into_iter().collect())
    }

    /// Returns the chooser that the policy names; `None` if it names none.
    ///
    /// # Errors
    /// The named chooser does not exist.
    pub fn of(&self, policy: Policy) -> Result<Option<&dyn Choice>, NoSuchChoice> {
        let Policy::Choice(name) = policy else {
            return Ok(None);
        };
        let found = self.0.iter().find(|choice| choice.name() == name.as_str());
        found
            .map(|choice| Some(&**choice))
            .ok_or_else(|| NoSuchChoice {
                name: name.as_str().to_string(),
                there: match self.0.is_empty() {
                    true => "this resource manager has no chooser".to_string(),
                    false => format!(
                        "there are {}",
                        self.0
                            .iter()
                            .map(|c| c.name())
                            .collect::<Vec<_>>()
                            .join(", ")
                    ),
                },
            })
    }
}

impl fmt::Debug for Choices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.0.iter().map(|choice| choice.name()))
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Chooser names are short words, and the error for an unknown chooser lists the available
    /// ones.
    #[test]
    fn chooser_names_are_checked_and_unknown_reported() {
        assert_eq!(
            ChoiceName::new("slurm-2_x").map(|name| name.as_str().to_string()),
            Some("slurm-2_x".into())
        );
        for name in ["", "a b", "x:y", &"x".repeat(CHOICE_NAME_MAX + 1)] {
            assert_eq!(ChoiceName::new(name), None, "{name:?}");
        }
        let longest = "x".repeat(CHOICE_NAME_MAX);
        assert_eq!(
            ChoiceName::new(&longest).expect("it fits").as_str(),
            longest
        );
        let policy = Policy::Choice(ChoiceName::new("slurm").expect("a name"));
        let error = Choices::default()
            .of(policy)
            .map(|_| ())
            .expect_err("nobody is there")
            .to_string();
        assert!(
            error.contains("the chooser \"slurm\", but this resource manager has no chooser"),
            "{error}"
        );
        assert!(
            Choices::default()
                .of(Policy::Load)
                .is_ok_and(|choice| choice.is_none())
        );
    }
}
