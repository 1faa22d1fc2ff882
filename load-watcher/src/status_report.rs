//! Builds the status of this host, with which the load watcher answers queries of users.

use crate::guest_status::{guest_statuses, stop_mechanism};
use pvm_load_watcher::eviction::{EngineState, EvictionMeans};
use pvm_load_watcher::machine_link::HostState;
use pvm_load_watcher::status::WatcherStatus;
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
    pub(crate) state: &'a HostState,
    /// True if the load watcher of the whole machine has observed the state.
    pub(crate) serves_machine: bool,
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
        let HostState {
            assessment,
            decision,
            policy,
            ..
        } = self.state;
        let access = decision.access;
        let (guests_text, leave_at_us, eviction_mode) = match access {
            GuestAccess::Welcome => ("welcome", None, None),
            GuestAccess::Paused { evict_at, eviction } => {
                ("stopped", evict_at.map(|at| at.0), Some(eviction))
            }
        };
        let presence_text = match assessment.verdict {
            OwnerVerdict::Absent { .. } => "absent",
            OwnerVerdict::Uncertain { .. } => "maybe",
            OwnerVerdict::Present { .. } => "present",
        };
        let means = EvictionMeans {
            has_rm: self.has_rm,
            has_other_hosts: self.hosts.hosts.iter().any(|entry| entry.id != self.host),
            engine: engine_state(self.engine),
        };
        let refusal_line = self
            .directive_refusal
            .map(|error| format!("the daemon has refused the directive about guests: {error}"));
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
            confidence: assessment.confidence,
            why: assessment.reason.clone(),
            sources: assessment.sources.clone(),
            guests: guests_text.into(),
            guests_why: decision.reason.clone(),
            leave_at_us,
            then: eviction_mode.map(|mode| mode.to_string()),
            cannot_leave: means
                .obstacle(access)
                .map(|obstacle| obstacle.to_string())
                .unwrap_or_default(),
            stopped_by: stopped_by.into(),
            stopped_by_why,
            policy: policy.settings.clone(),
            wrong: policy.errors.iter().cloned().chain(refusal_line).collect(),
            directive_error: self.directive_refusal.unwrap_or_default().into(),
            tasks: guest_statuses(self.tasks),
            read_files: policy.read_files.clone(),
            switched_off_by: policy.switched_off_by.clone().unwrap_or_default(),
            clock: describe_clock(self.now.0 / 1_000_000),
            machine_sense: self.serves_machine,
            pid: 0,
        }
    }
}
