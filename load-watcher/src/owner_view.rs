//! The owner's side of one virtual machine: the merged policy, the owner verdict and the decision
//! about guests.

use crate::sensors::{
    ADMIN_POLICY_PATH_INDEX, OVERRIDES_PATH_INDEX, Sensors, USER_POLICY_PATH_INDEX,
};
use pvm_load_watcher::guests::{GuestDecision, GuestGate, GuestInputs};
use pvm_load_watcher::host_policy::HostPolicy;
use pvm_load_watcher::machine_link::HostState;
use pvm_load_watcher::owner::{OwnerAssessment, OwnerDetector, OwnerSigns, available_logins};
use pvm_load_watcher::owner_override::Drain;
use pvm_load_watcher::policy::{DEFAULT_IDLE_AFTER_MIN, Policy};
use pvm_load_watcher::system::{local_time, time_of_day};
use sempa_proto::Micros;
use sempa_proto::load::OwnerVerdict;

pub(crate) struct OwnerView {
    uid: u32,
    user: String,
    pub(crate) host_policy: HostPolicy,
    detector: OwnerDetector,
    gate: GuestGate,
    assessment: OwnerAssessment,
    decision: GuestDecision,
}

impl OwnerView {
    /// Creates the view for the virtual machine of a user. Logs the errors in the policies.
    pub(crate) fn new(uid: u32, user: String, host_policy: HostPolicy) -> Self {
        let errors = host_policy.errors();
        errors.iter().for_each(|line| tracing::warn!("{line}"));
        Self {
            uid,
            user,
            host_policy,
            detector: OwnerDetector::default(),
            gate: GuestGate::default(),
            assessment: OwnerAssessment::default(),
            decision: GuestDecision::default(),
        }
    }

    pub(crate) fn uid(&self) -> u32 {
        self.uid
    }

    pub(crate) fn policy(&self) -> &Policy {
        &self.host_policy.merged_policy().policy
    }

    /// Time without input after which the user of a login is only possibly present.
    pub(crate) fn idle_after(&self) -> Micros {
        let minutes = self.policy().idle_after_min;
        Micros::from_secs(u64::from(minutes.unwrap_or(DEFAULT_IDLE_AFTER_MIN)) * 60)
    }

    /// Reads the policies whose path index `selects_index` accepts. Logs new errors.
    pub(crate) fn read_policies(&mut self, selects_index: impl Fn(usize) -> bool) {
        self.change_policy(|host_policy| {
            if selects_index(ADMIN_POLICY_PATH_INDEX) {
                host_policy.read_admin_policy();
            }
            // In the load watcher of a whole machine another path has this index; the content that
            // was received is then merged again.
            if selects_index(USER_POLICY_PATH_INDEX) {
                host_policy.read_user_policy();
            }
            if selects_index(OVERRIDES_PATH_INDEX) {
                host_policy.read_overrides();
            }
        });
    }

    /// Reads the overrides again if other users may have been selected. Returns true if so.
    pub(crate) fn take_file_users_event(&mut self) -> bool {
        let is_due = self.host_policy.take_file_users_event();
        if is_due {
            self.read_policies(|index| index == OVERRIDES_PATH_INDEX);
        }
        is_due
    }

    /// Reads all policies again if some are refused, or if users are omitted. No watch reports that
    /// a file has become readable, or that a user has got an account.
    pub(crate) fn retry_policies(&mut self) {
        if self.host_policy.policy_unknown().is_some() || self.host_policy.omits_users() {
            self.read_policies(|_| true);
        }
    }

    /// Changes the policy. Logs the errors that were not there before.
    pub(crate) fn change_policy<R>(&mut self, change: impl FnOnce(&mut HostPolicy) -> R) -> R {
        let previous_errors = self.host_policy.errors();
        let result = change(&mut self.host_policy);
        self.host_policy
            .errors()
            .iter()
            .filter(|line| !previous_errors.contains(line))
            .for_each(|line| tracing::warn!("{line}"));
        result
    }

    /// True if a decision is needed now, because memory became short or sufficient.
    pub(crate) fn memory_needs_decision(&self, available_bytes: u64) -> bool {
        self.gate
            .needs_decision(self.policy(), available_bytes, time_of_day())
    }

    /// Derives a new assessment of the owner and a new decision about guests. `has_rm` states
    /// whether a resource manager runs: without one, the guests are the user's own programs and
    /// cannot leave.
    pub(crate) fn assess(&mut self, sensors: &mut Sensors, has_rm: bool) {
        let now = time_of_day();
        let observations = &sensors.observations;
        let logins = available_logins(&observations.login_records, &observations.sessions);
        self.change_policy(|host_policy| host_policy.update_logins(&logins));
        sensors.read_terminals(&logins);
        let idle_after = self.idle_after();
        let observations = &sensors.observations;
        let signs = OwnerSigns {
            records_path: sensors.records_path(),
            login_records: &observations.login_records,
            sessions: &observations.sessions,
            logind_error: observations.logind_error.as_deref(),
            terminal_input: &observations.terminal_input,
            input_activity: observations.input_probe.evidence(),
            external_load: &observations.external_load,
            overrides: self.host_policy.overrides(),
            owners: self.host_policy.owners(),
            idle_after,
            own_user: (!has_rm).then_some(self.user.as_str()),
        };
        self.assessment = self.detector.derive_verdict(now, &signs);
        let drain_sentence = self.host_policy.drain().map(Drain::sentence);
        self.decision = self.gate.decide(&GuestInputs {
            policy: &self.host_policy.merged_policy().policy,
            drained: drain_sentence.as_deref(),
            policy_unknown: self.host_policy.policy_unknown(),
            blocked_uids: self.host_policy.blocked_uids(),
            vm_uid: self.uid,
            owner_verdict: &self.assessment.verdict,
            owner_reason: &self.assessment.reason,
            available_bytes: sensors.last_sample.available_bytes,
            local_time: local_time(now.0 / 1_000_000),
            now,
        });
        if let Some(source) = self.host_policy.switched_off_by() {
            let reason = format!("watch = false in {source}: no owner is watched for");
            (self.assessment.verdict, self.assessment.reason) = (OwnerVerdict::default(), reason);
            self.decision = GuestDecision::default();
        }
    }

    /// Returns the state of the machine for this virtual machine, as last assessed. The sample is
    /// that of the whole machine.
    pub(crate) fn state(&self, sensors: &Sensors) -> HostState {
        HostState {
            sample: sensors.last_sample,
            assessment: self.assessment.clone(),
            decision: self.decision.clone(),
            policy: self.host_policy.summary(),
        }
    }
}
