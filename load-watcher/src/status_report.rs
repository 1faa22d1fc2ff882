//! Builds the status of this host, with which the load watcher answers queries of users.

use crate::guest_status::{guest_statuses, stop_mechanism};
use pvm_load_watcher::eviction::{EngineState, EvictionMeans};
use pvm_load_watcher::guests::GuestDecision;
use pvm_load_watcher::host_policy::HostPolicy;
use pvm_load_watcher::owner::OwnerAssessment;
use pvm_load_watcher::status::{PolicySetting, WatcherStatus};
use pvm_load_watcher::system::describe_clock;
use sempa_proto::load::OwnerVerdict;
use sempa_proto::owner::GuestAccess;
use sempa_proto::table::{HostTable, TaskInfo};
use sempa_proto::task::Reply;
use sempa_proto::{HostId, Micros};

/// The facts from which the status is built.
#[derive(Debug)]
pub(crate) struct StatusInputs<'a> {
    /// Name of the virtual machine.
    pub(crate) vm: &'a str,
    /// Login name of the user of the virtual machine.
    pub(crate) user: &'a str,
    pub(crate) host: HostId,
    pub(crate) hosts: &'a HostTable,
    pub(crate) has_rm: bool,
    pub(crate) assessment: &'a OwnerAssessment,
    pub(crate) decision: &'a GuestDecision,
    pub(crate) host_policy: &'a HostPolicy,
    /// The reason why the daemon has refused the last directive.
    pub(crate) directive_refusal: Option<&'a str>,
    /// The tasks of this host.
    pub(crate) tasks: &'a [TaskInfo],
    /// The daemon's answer by what it stops guests.
    pub(crate) freezer: Reply,
    /// The daemon's answer whether tasks can be dumped.
    pub(crate) engine: Reply,
    pub(crate) now: Micros,
}

/// Returns what is known about the dump engine from the daemon's answer.
fn engine_state(reply: Reply) -> EngineState {
    match reply {
        Reply::Engine(Some(Ok(_))) => EngineState::Works,
        Reply::Engine(Some(Err(reason))) => EngineState::Missing(reason.to_string()),
        _ => EngineState::Unknown,
    }
}

impl StatusInputs<'_> {
    pub(crate) fn into_status(self) -> WatcherStatus {
        let access = self.decision.access;
        let (guests_text, leave_at_us, eviction_mode) = match access {
            GuestAccess::Welcome => ("welcome", None, None),
            GuestAccess::Paused { evict_at, eviction } => {
                ("stopped", evict_at.map(|at| at.0), Some(eviction))
            }
        };
        let presence_text = match self.assessment.verdict {
            OwnerVerdict::Absent { .. } => "absent",
            OwnerVerdict::Uncertain { .. } => "maybe",
            OwnerVerdict::Present { .. } => "present",
        };
        let means = EvictionMeans {
            has_rm: self.has_rm,
            has_other_hosts: self.hosts.hosts.iter().any(|entry| entry.id != self.host),
            engine: engine_state(self.engine),
        };
        let policy_setting = |(name, value, origin): &(&str, String, String)| PolicySetting {
            name: name.to_string(),
            value: value.clone(),
            from: origin.clone(),
        };
        let settings = &self.host_policy.merged_policy().settings;
        let refusal_line = self
            .directive_refusal
            .map(|error| format!("the daemon has refused the directive about guests: {error}"));
        let sources = &self.assessment.sources;
        let sources = sources
            .iter()
            .map(|(name, text)| (name.to_string(), text.clone()));
        let (stopped_by, stopped_by_why) = stop_mechanism(self.freezer);
        WatcherStatus {
            vm: self.vm.into(),
            user: self.user.into(),
            host: self
                .hosts
                .get(self.host)
                .map(|entry| entry.name.clone())
                .unwrap_or_default(),
            owner: presence_text.into(),
            confidence: self.assessment.confidence,
            why: self.assessment.reason.clone(),
            sources: sources.collect(),
            guests: guests_text.into(),
            guests_why: self.decision.reason.clone(),
            leave_at_us,
            then: eviction_mode.map(|mode| mode.to_string()),
            cannot_leave: means
                .obstacle(access)
                .map(|obstacle| obstacle.to_string())
                .unwrap_or_default(),
            stopped_by: stopped_by.into(),
            stopped_by_why,
            policy: settings.iter().map(policy_setting).collect(),
            wrong: self
                .host_policy
                .errors()
                .into_iter()
                .chain(refusal_line)
                .collect(),
            directive_error: self.directive_refusal.unwrap_or_default().into(),
            tasks: guest_statuses(self.tasks),
            read_files: self.host_policy.read_files().to_vec(),
            switched_off_by: self
                .host_policy
                .switched_off_by()
                .unwrap_or_default()
                .into(),
            clock: describe_clock(self.now.0 / 1_000_000),
            pid: 0,
        }
    }
}
