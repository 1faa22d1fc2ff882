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
/// because the command line may be different at the next start.
type StoredPolicy = (String, String);

impl Options {
    /// Returns the policy at the start: the policy of the command line with the policy file's
    /// settings applied, if there is a file.
    ///
    /// # Errors
    ///
    /// [`ServiceError::InvalidPolicy`] or [`ServiceError::UnreadablePolicy`] if the file is invalid
    /// or cannot be read. [`ServiceError::UnknownChooser`] if the policy names an unknown chooser.
    pub fn start_policy(&self) -> Result<EffectivePolicy, ServiceError> {
        match &self.policy_content {
            Some(Ok(content)) => self.parse_policy(content),
            Some(Err(why)) => Err(ServiceError::UnreadablePolicy {
                file: self.policy_file.clone(),
                why: why.clone(),
            }),
            None => {
                self.choosers.for_policy(self.policy.placement)?;
                Ok(self.policy)
            }
        }
    }

    fn parse_policy(&self, content: &[u8]) -> Result<EffectivePolicy, ServiceError> {
        let policy = self
            .command_line_policy
            .with_file(&self.policy_file, content)?;
        self.choosers.for_policy(policy.placement)?;
        Ok(policy)
    }

    /// Applies the policy at the start. If the policy file is invalid or cannot be read, applies
    /// the stored text of the file and returns a sentence that reports the error. Otherwise returns
    /// `None`.
    ///
    /// # Errors
    ///
    /// The error of the file, if no valid text of the file is stored.
    pub(super) fn apply_policy_at_start(
        &mut self,
        history: &mut History,
    ) -> Result<Option<String>, ServiceError> {
        let policy_error = match self.start_policy() {
            Ok(new_policy) => {
                self.policy = new_policy;
                if let Some(Ok(content)) = &self.policy_content {
                    self.store_policy(history, content);
                }
                return Ok(None);
            }
            Err(error) => error,
        };
        let stored_policy = history
            .learned_value(POLICY_KEY)
            .and_then(|bytes| from_bytes::<StoredPolicy>(bytes).ok());
        let stored_policy = stored_policy
            .filter(|(file, _)| *file == self.absolute_path())
            .and_then(|(_, text)| self.parse_policy(text.as_bytes()).ok());
        let Some(new_policy) = stored_policy else {
            return Err(policy_error);
        };
        self.policy = new_policy;
        Ok(Some(self.refusal_note(&policy_error)))
    }

    /// Stores the text of the policy file in the history.
    fn store_policy(&self, history: &mut History, content: &[u8]) {
        let Ok(text) = String::from_utf8(content.to_vec()) else {
            return;
        };
        if let Ok(bytes) = to_bytes::<StoredPolicy>(&(self.absolute_path(), text)) {
            history.set_learned_value(POLICY_KEY, bytes);
        }
    }

    /// Returns the absolute path of the policy file.
    fn absolute_path(&self) -> String {
        std::path::absolute(&self.policy_file).map_or_else(
            |_| self.policy_file.clone(),
            |path| path.display().to_string(),
        )
    }

    /// Returns a sentence that states why the policy file was not applied.
    fn refusal_note(&self, policy_error: &ServiceError) -> String {
        let file = &self.policy_file;
        let reason = match policy_error {
            ServiceError::UnreadablePolicy { why: reason, .. } => {
                format!("{file} cannot be read: {reason}")
            }
            ServiceError::UnknownChooser(error) => format!("{file}: {error}"),
            other => other.to_string(),
        };
        format!("{reason}; the file is ignored, and the policy is unchanged")
    }
}

impl<V: VmApi> Service<V> {
    /// Returns the policy in force.
    pub fn policy(&self) -> EffectivePolicy {
        self.options.policy
    }

    /// Puts a policy into force and revokes all grants. Starts or stops rebalancing as the policy
    /// requires, and records the policy as input.
    pub(super) fn apply_policy(&mut self, new_policy: EffectivePolicy) {
        self.options.policy = new_policy;
        self.model
            .set_policy(new_policy.placement, new_policy.gain_margin);
        self.spawns.set_rules(new_policy.spawn_rules);
        self.revoke_grants();
        let next_rebalance = self
            .rebalance_at
            .unwrap_or(self.vm.now() + REBALANCE_INTERVAL);
        self.rebalance_at = new_policy.rebalances.then_some(next_rebalance);
        self.needs_eviction_decision = true;
        self.record_input(|| RecordedInput::Policy(new_policy));
    }

    /// Handles a change of the policy file: stores the new content and applies it. If the new
    /// content is invalid, the current policy stays in force and the error is logged.
    pub(super) fn handle_policy_change(&mut self, content: &[u8]) {
        let new_policy = match self.options.parse_policy(content) {
            Ok(new_policy) => new_policy,
            Err(policy_error) => return self.log_note(self.options.refusal_note(&policy_error)),
        };
        self.options
            .store_policy(&mut self.history.writer.history, content);
        if new_policy != self.options.policy {
            self.apply_policy(new_policy);
            self.log_note(format!(
                "the policy in {} is in force: {new_policy}",
                self.options.policy_file
            ));
        }
    }

    /// Starts recording the service's input. The recording begins with the current policy, hosts,
    /// labels and drains.
    pub fn start_recording(&mut self, recorder: Recorder) {
        self.recorder = Some(recorder);
        let current_policy = self.options.policy;
        self.record_input(|| RecordedInput::Policy(current_policy));
        if let Ok(table) = self.vm.host_table() {
            self.record_input(|| RecordedInput::Hosts(table));
        }
        if let Some(labels_input) = RecordedInput::labels(&self.options.labels) {
            self.record_input(|| labels_input);
        }
        self.record_drains();
    }

    pub(super) fn record_input(&mut self, input: impl FnOnce() -> RecordedInput) {
        let Some(recorder) = &mut self.recorder else {
            return;
        };
        if let Some(end_note) = recorder.append(self.vm.now(), input()) {
            self.recorder = None;
            self.log_note(end_note);
        }
    }
}
