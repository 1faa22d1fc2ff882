//! Applies the policy at the start and when the policy file changes, and records the service's
//! input.
//!
//! The history stores the text of the last valid policy file. If the file has become invalid or is
//! missing, a restarted resource manager uses the stored text.

use super::{Options, REBALANCE_INTERVAL, Service, ServiceError};
use crate::api::VmApi;
use crate::policy::EffectivePolicy;
use crate::recording::{RecordedInput, Recorder};
use crate::store::History;
use sempa_proto::frame::{from_bytes, to_bytes};

/// Key of the stored policy file, within the learned values of the history.
const POLICY_KEY: u64 = 2;

/// A stored policy file, as (path, text). The text is stored instead of the resulting policy,
/// because the command line may differ at the next start.
type StoredPolicy = (String, String);

impl Options {
    /// Returns the policy at the start: the policy file's settings applied to the command line, or
    /// the policy of the command line if there is no file.
    ///
    /// # Errors
    /// [`ServiceError::InvalidPolicy`] or [`ServiceError::UnreadablePolicy`] if the file is invalid
    /// or cannot be read. [`ServiceError::UnknownChooser`] if the policy names an unknown chooser.
    pub fn policy(&self) -> Result<EffectivePolicy, ServiceError> {
        match &self.policy_content {
            Some(Ok(content)) => self.policy_from(content),
            Some(Err(why)) => Err(ServiceError::UnreadablePolicy {
                file: self.policy_file.clone(),
                why: why.clone(),
            }),
            None => {
                self.choosers.for_policy(self.policy.placing)?;
                Ok(self.policy)
            }
        }
    }

    fn policy_from(&self, content: &[u8]) -> Result<EffectivePolicy, ServiceError> {
        let conduct = self
            .command_line_policy
            .with_file(&self.policy_file, content)?;
        self.choosers.for_policy(conduct.placing)?;
        Ok(conduct)
    }

    /// Applies the policy at the start. If the policy file is invalid, applies its stored text and
    /// returns a sentence that reports the error.
    ///
    /// # Errors
    /// The error of the file, if no valid text of it is stored.
    pub(super) fn apply_policy_at_start(
        &mut self,
        books: &mut History,
    ) -> Result<Option<String>, ServiceError> {
        let wrong = match self.policy() {
            Ok(conduct) => {
                self.policy = conduct;
                if let Some(Ok(content)) = &self.policy_content {
                    self.store_policy(books, content);
                }
                return Ok(None);
            }
            Err(error) => error,
        };
        let stored = books
            .learned(POLICY_KEY)
            .and_then(|bytes| from_bytes::<StoredPolicy>(bytes).ok());
        let stored = stored
            .filter(|(file, _)| *file == self.absolute_path())
            .and_then(|(_, text)| self.policy_from(text.as_bytes()).ok());
        let Some(conduct) = stored else {
            return Err(wrong);
        };
        self.policy = conduct;
        Ok(Some(self.refusal_note(&wrong)))
    }

    /// Stores the text of the policy file in the history.
    fn store_policy(&self, books: &mut History, content: &[u8]) {
        let Ok(text) = String::from_utf8(content.to_vec()) else {
            return;
        };
        if let Ok(bytes) = to_bytes::<StoredPolicy>(&(self.absolute_path(), text)) {
            books.set_learned(POLICY_KEY, bytes);
        }
    }

    /// Returns the absolute path of the policy file.
    fn absolute_path(&self) -> String {
        std::path::absolute(&self.policy_file).map_or_else(
            |_| self.policy_file.clone(),
            |path| path.display().to_string(),
        )
    }

    /// Returns a sentence that says why the policy file was not applied.
    fn refusal_note(&self, wrong: &ServiceError) -> String {
        let file = &self.policy_file;
        let why = match wrong {
            ServiceError::UnreadablePolicy { why, .. } => format!("{file} cannot be read: {why}"),
            ServiceError::UnknownChooser(error) => format!("{file}: {error}"),
            other => other.to_string(),
        };
        format!("{why}; the file is ignored, and the policy is unchanged")
    }
}

impl<V: VmApi> Service<V> {
    /// Returns the policy in force.
    pub fn policy(&self) -> EffectivePolicy {
        self.options.policy
    }

    /// Puts a policy into force.
    pub(super) fn apply_policy(&mut self, conduct: EffectivePolicy) {
        self.options.policy = conduct;
        self.model.set_policy(conduct.placing, conduct.margin);
        self.spawns.set_rules(conduct.rules);
        self.revoke_grants();
        let next = self
            .rebalance_at
            .unwrap_or(self.vm.now() + REBALANCE_INTERVAL);
        self.rebalance_at = conduct.balance.then_some(next);
        self.needs_decision = true;
        self.record_input(|| RecordedInput::Policy(conduct));
    }

    /// Handles a change of the policy file. If the new content is invalid, the policy stays in
    /// force and the error is logged.
    pub(super) fn policy_changed(&mut self, content: &[u8]) {
        let conduct = match self.options.policy_from(content) {
            Ok(conduct) => conduct,
            Err(wrong) => return self.log_note(self.options.refusal_note(&wrong)),
        };
        self.options
            .store_policy(&mut self.history.writer.history, content);
        if conduct != self.options.policy {
            self.apply_policy(conduct);
            self.log_note(format!(
                "the policy in {} is in force: {conduct}",
                self.options.policy_file
            ));
        }
    }

    /// Starts recording the service's input. The recording begins with the current policy, hosts,
    /// labels and drains.
    pub fn record_to(&mut self, recorder: Recorder) {
        self.recorder = Some(recorder);
        let conduct = self.options.policy;
        self.record_input(|| RecordedInput::Policy(conduct));
        if let Ok(table) = self.vm.host_table() {
            self.record_input(|| RecordedInput::Hosts(table));
        }
        if let Some(labels) = RecordedInput::labels(&self.options.labels) {
            self.record_input(|| labels);
        }
        self.record_drains();
    }

    pub(super) fn record_input(&mut self, input: impl FnOnce() -> RecordedInput) {
        let Some(recorder) = &mut self.recorder else {
            return;
        };
        if let Some(why) = recorder.append(self.vm.now(), input()) {
            self.recorder = None;
            self.log_note(why);
        }
    }
}
