//! The policy while the service runs, and the record of what it was told.

use super::{BALANCE_PAUSE, Service};
use crate::api::VmApi;
use crate::policy::Conduct;
use crate::recording::{Input, Recorder};

impl<V: VmApi> Service<V> {
    /// Works by this from now on.
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

    /// The policy file has changed: what it says is in force, or, when something is wrong with it, what was.
    pub(super) fn policy_changed(&mut self, content: &[u8]) {
        match self.options.given.with_file(&self.options.policy_file, content) {
            Ok(conduct) if conduct == self.options.conduct => {}
            Ok(conduct) if self.options.choices.of(conduct.placing).is_err() => {
                let error = self.options.choices.of(conduct.placing).err().map(|e| e.to_string()).unwrap_or_default();
                let file = &self.options.policy_file;
                self.note(format!("{file}: {error}; the file is not taken over, and the policy stays as it was"));
            }
            Ok(conduct) => {
                self.take_up(conduct);
                self.note(format!("the policy in {} is in force: {conduct}", self.options.policy_file));
            }
            Err(error) => self.note(format!("{error}; the file is not taken over, and the policy stays as it was")),
        }
    }

    /// Writes down from now on what the service is told, what it knows already first.
    pub fn record_to(&mut self, recorder: Recorder) {
        self.recorder = Some(recorder);
        let conduct = self.options.conduct;
        self.record_input(|| Input::Policy(conduct));
        if let Ok(table) = self.vm.config() {
            self.record_input(|| Input::Hosts(table));
        }
        self.record_drains();
    }

    pub(super) fn record_input(&mut self, input: impl FnOnce() -> Input) {
        let Some(recorder) = &mut self.recorder else { return };
        if let Some(why) = recorder.put(self.vm.now(), input()) {
            self.recorder = None;
            self.note(why);
        }
    }
}
