//! The policy at the start and during operation, and the recording of the service's input.
//!
//! The text of the policy file that was last in force is stored in the history. A file that has
//! become invalid or is missing therefore does not prevent a restart.

use super::{BALANCE_PAUSE, Options, Service, ServiceError};
use crate::api::VmApi;
use crate::policy::Conduct;
use crate::recording::{Input, Recorder};
use crate::store::Books;
use sempa_proto::frame::{from_bytes, to_bytes};

/// Key of the stored policy file, among the learned values of the history.
const POLICY: u64 = 2;

/// A stored policy file: path and text. The text is stored instead of the resulting policy, because
/// the command line may differ next time.
type Kept = (String, String);

impl Options {
    /// Returns the policy of the file at the start; without a file, that of the command line.
    ///
    /// # Errors
    /// [`ServiceError::Policy`], [`ServiceError::NoPolicy`] or [`ServiceError::Choice`]: what is
    /// invalid.
    pub fn policy(&self) -> Result<Conduct, ServiceError> {
        match &self.policy_read {
            Some(Ok(content)) => self.read(content),
            Some(Err(why)) => Err(ServiceError::NoPolicy {
                file: self.policy_file.clone(),
                why: why.clone(),
            }),
            None => {
                self.choices.of(self.conduct.placing)?;
                Ok(self.conduct)
            }
        }
    }

    fn read(&self, content: &[u8]) -> Result<Conduct, ServiceError> {
        let conduct = self.given.with_file(&self.policy_file, content)?;
        self.choices.of(conduct.placing)?;
        Ok(conduct)
    }

    /// Applies the policy file. If it is invalid, applies its stored text and returns a sentence
    /// about the error.
    pub(super) fn begin(&mut self, books: &mut Books) -> Result<Option<String>, ServiceError> {
        let wrong = match self.policy() {
            Ok(conduct) => {
                self.conduct = conduct;
                if let Some(Ok(content)) = &self.policy_read {
                    self.keep(books, content);
                }
                return Ok(None);
            }
            Err(error) => error,
        };
        let kept = books
            .learned(POLICY)
            .and_then(|bytes| from_bytes::<Kept>(bytes).ok());
        let kept = kept
            .filter(|(file, _)| *file == self.path())
            .and_then(|(_, text)| self.read(text.as_bytes()).ok());
        let Some(conduct) = kept else {
            return Err(wrong);
        };
        self.conduct = conduct;
        Ok(Some(self.refusal(&wrong)))
    }

    /// Stores the text of a policy file that is in force.
    fn keep(&self, books: &mut Books, content: &[u8]) {
        let Ok(text) = String::from_utf8(content.to_vec()) else {
            return;
        };
        if let Ok(bytes) = to_bytes::<Kept>(&(self.path(), text)) {
            books.learn(POLICY, bytes);
        }
    }

    /// Returns the absolute path of the policy file.
    fn path(&self) -> String {
        std::path::absolute(&self.policy_file).map_or_else(
            |_| self.policy_file.clone(),
            |path| path.display().to_string(),
        )
    }

    /// Returns a sentence that the file was not applied, and why.
    fn refusal(&self, wrong: &ServiceError) -> String {
        let file = &self.policy_file;
        let why = match wrong {
            ServiceError::NoPolicy { why, .. } => format!("{file} cannot be read: {why}"),
            ServiceError::Choice(error) => format!("{file}: {error}"),
            other => other.to_string(),
        };
        format!("{why}; the file is ignored, and the policy is unchanged")
    }
}

impl<V: VmApi> Service<V> {
    /// Returns the policy in force.
    pub fn conduct(&self) -> Conduct {
        self.options.conduct
    }

    /// Applies a policy from now on.
    pub(super) fn take_up(&mut self, conduct: Conduct) {
        self.options.conduct = conduct;
        self.model.set_policy(conduct.placing, conduct.margin);
        self.spawns.set_rules(conduct.rules);
        self.take_grants_back();
        let next = self.balance_at.unwrap_or(self.vm.now() + BALANCE_PAUSE);
        self.balance_at = conduct.balance.then_some(next);
        self.changed = true;
        self.record_input(|| Input::Policy(conduct));
    }

    /// Handles a change of the policy file. An invalid file leaves the policy in force.
    pub(super) fn policy_changed(&mut self, content: &[u8]) {
        let conduct = match self.options.read(content) {
            Ok(conduct) => conduct,
            Err(wrong) => return self.note(self.options.refusal(&wrong)),
        };
        self.options.keep(&mut self.memory.ledger.books, content);
        if conduct != self.options.conduct {
            self.take_up(conduct);
            self.note(format!(
                "the policy in {} is in force: {conduct}",
                self.options.policy_file
            ));
        }
    }

    /// Starts recording the service's input, beginning with what it already knows.
    pub fn record_to(&mut self, recorder: Recorder) {
        self.recorder = Some(recorder);
        let conduct = self.options.conduct;
        self.record_input(|| Input::Policy(conduct));
        if let Ok(table) = self.vm.config() {
            self.record_input(|| Input::Hosts(table));
        }
        if let Some(labels) = Input::labels(&self.options.labels) {
            self.record_input(|| labels);
        }
        self.record_drains();
    }

    pub(super) fn record_input(&mut self, input: impl FnOnce() -> Input) {
        let Some(recorder) = &mut self.recorder else {
            return;
        };
        if let Some(why) = recorder.put(self.vm.now(), input()) {
            self.recorder = None;
            self.note(why);
        }
    }
}
