//! External choosers: code outside this crate that selects the hosts of spawns, for example for a
//! batch system that has reserved hosts.
//!
//! The resource manager checks each selection and explains it like its own decisions. The policy
//! names the chooser ([`super::PlacementPolicy::Chooser`]).

use super::{HostView, PlacementPolicy, ProcessorShare};
use sempa_proto::task::SpawnRequest;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;
use thiserror::Error;

/// A host that a chooser may select for a request.
#[derive(Clone, Copy, Debug)]
pub struct HostOffer<'a> {
    pub host: &'a HostView,
    /// Processor share that one more task would get on the host.
    pub share: ProcessorShare,
    /// Maximum number of tasks of the request that the host can accept.
    pub capacity: u32,
}

/// Selects hosts for spawns in place of the built-in policies.
pub trait Chooser {
    /// Returns the name by which policies and explanations refer to the chooser.
    fn name(&self) -> &str;
    /// Selects hosts for the `task_count` tasks of one spawn. Returns indices into `offers`, one
    /// per task, in task order. If there are fewer indices than tasks, the last tasks get no host.
    ///
    /// # Errors
    ///
    /// A text that states why no host was selected. In this case no task is placed.
    fn choose(
        &self,
        request: &SpawnRequest,
        offers: &[HostOffer<'_>],
        task_count: usize,
    ) -> Result<Vec<usize>, String>;
}

/// Name of a chooser in a policy.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChooserName([u8; CHOOSER_NAME_MAX]);

/// Maximum length of a chooser's name, in bytes.
pub const CHOOSER_NAME_MAX: usize = 32;

impl ChooserName {
    /// Returns `None` unless the name consists of 1 to [`CHOOSER_NAME_MAX`] letters, digits, `-`
    /// and `_`.
    pub fn new(name: &str) -> Option<Self> {
        let is_name_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        if name.is_empty() || name.len() > CHOOSER_NAME_MAX || !name.bytes().all(is_name_byte) {
            return None;
        }
        let mut bytes = [0; CHOOSER_NAME_MAX];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        Some(Self(bytes))
    }

    pub fn as_str(&self) -> &str {
        let end = self
            .0
            .iter()
            .position(|byte| *byte == 0)
            .unwrap_or(CHOOSER_NAME_MAX);
        std::str::from_utf8(&self.0[..end]).unwrap_or_default()
    }
}

impl fmt::Debug for ChooserName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Error: the policy names a chooser that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "the policy names the chooser {name:?}, but {available_choosers}: use load or round-robin, or a pvm-rm that has it"
)]
pub struct UnknownChooser {
    pub name: String,
    /// Text that lists the available choosers.
    pub available_choosers: String,
}

/// External choosers that are available to the resource manager.
#[derive(Clone, Default)]
pub struct Choosers(Vec<Arc<dyn Chooser>>);

impl Choosers {
    /// Creates the list. If two choosers have the same name, only the first one is used.
    pub fn new(choosers: impl IntoIterator<Item = Arc<dyn Chooser>>) -> Self {
        Self(choosers.into_iter().collect())
    }

    /// Returns the chooser that the policy names. Returns `None` if the policy names no chooser.
    ///
    /// # Errors
    ///
    /// The named chooser does not exist.
    pub fn for_policy(
        &self,
        policy: PlacementPolicy,
    ) -> Result<Option<&dyn Chooser>, UnknownChooser> {
        let PlacementPolicy::Chooser(name) = policy else {
            return Ok(None);
        };
        let named_chooser = self
            .0
            .iter()
            .find(|listed_chooser| listed_chooser.name() == name.as_str());
        named_chooser
            .map(|listed_chooser| Some(&**listed_chooser))
            .ok_or_else(|| UnknownChooser {
                name: name.as_str().to_string(),
                available_choosers: match self.0.is_empty() {
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

impl fmt::Debug for Choosers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.0.iter().map(|chooser| chooser.name()))
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chooser name consists of 1 to [`CHOOSER_NAME_MAX`] letters, digits, `-` and `_`. An
    /// unknown chooser is reported as an error. The built-in policies need no chooser.
    #[test]
    fn chooser_names_are_checked_and_unknown_reported() {
        assert_eq!(
            ChooserName::new("slurm-2_x").map(|name| name.as_str().to_string()),
            Some("slurm-2_x".into())
        );
        for name in ["", "a b", "x:y", &"x".repeat(CHOOSER_NAME_MAX + 1)] {
            assert_eq!(ChooserName::new(name), None, "{name:?}");
        }
        let longest_name = "x".repeat(CHOOSER_NAME_MAX);
        assert_eq!(
            ChooserName::new(&longest_name).expect("it fits").as_str(),
            longest_name
        );
        let policy = PlacementPolicy::Chooser(ChooserName::new("slurm").expect("a name"));
        let error = Choosers::default()
            .for_policy(policy)
            .map(|_| ())
            .expect_err("nobody is there")
            .to_string();
        assert!(
            error.contains("the chooser \"slurm\", but this resource manager has no chooser"),
            "{error}"
        );
        assert!(
            Choosers::default()
                .for_policy(PlacementPolicy::Load)
                .is_ok_and(|found_chooser| found_chooser.is_none())
        );
    }
}
