//! Places chosen by somebody else: a batch system that has reserved hosts, or any other rule. Its word is checked; the
//! decision stays ours, and so does its sentence. The policy names who chooses ([`super::Policy::Choice`]).

use super::{HostView, Policy, Share};
use sempa_proto::task::SpawnRequest;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;
use thiserror::Error;

/// A host that the request allows and that is free.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// The host.
    pub host: &'a HostView,
    /// What one more task would get there.
    pub share: Share,
    /// Tasks that it can take at most.
    pub capacity: u32,
}

/// Somebody who chooses hosts.
pub trait Choice {
    /// Who it is, for sentences, and for the policy that wants it.
    fn name(&self) -> &str;
    /// Hosts for the tasks of one spawn: indices into `offers`, one for each task, in the order of the tasks. Fewer than
    /// `count` leave the last tasks without a place.
    ///
    /// # Errors
    /// Why there is none; the tasks are not placed.
    fn choose(
        &self,
        request: &SpawnRequest,
        offers: &[Offer<'_>],
        count: usize,
    ) -> Result<Vec<usize>, String>;
}

/// The name of a choice, as a policy has it.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChoiceName([u8; CHOICE_NAME_MAX]);

/// Bytes of such a name at most.
pub const CHOICE_NAME_MAX: usize = 32;

impl ChoiceName {
    /// `None` for what is no name: letters, digits, `-` and `_`, and not too many of them.
    pub fn new(name: &str) -> Option<ChoiceName> {
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        if name.is_empty() || name.len() > CHOICE_NAME_MAX || !name.bytes().all(is_word) {
            return None;
        }
        let mut bytes = [0; CHOICE_NAME_MAX];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        Some(ChoiceName(bytes))
    }

    /// It as a text.
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

/// A policy that names somebody who is not there.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "the policy has places chosen by {name:?}, and {there}: use load or round-robin, or a pvm-rm that has it"
)]
pub struct NoSuchChoice {
    /// The name.
    pub name: String,
    /// Who is there, in words.
    pub there: String,
}

/// Those who can choose.
#[derive(Clone, Default)]
pub struct Choices(Vec<Arc<dyn Choice>>);

impl Choices {
    /// These; of two with one name the first counts.
    pub fn new(choices: impl IntoIterator<Item = Arc<dyn Choice>>) -> Choices {
        Choices(choices.into_iter().collect())
    }

    /// Who chooses by this policy; `None`: the policy itself.
    ///
    /// # Errors
    /// It names somebody who is not there.
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
                    true => "this resource manager has nobody who chooses".to_string(),
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

    #[test]
    fn names_are_short_words_and_who_is_not_there_is_said_with_who_is() {
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
            error.contains("chosen by \"slurm\", and this resource manager has nobody who chooses"),
            "{error}"
        );
        assert!(
            Choices::default()
                .of(Policy::Load)
                .is_ok_and(|choice| choice.is_none())
        );
    }
}
