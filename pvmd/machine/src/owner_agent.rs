//! Handles the end of an owner agent: a task that directs the guests of this host on behalf of its
//! owner.
//!
//! An owner agent is the host's load watcher or a program of the user. When it ends, its last
//! directive stays in force:
//!
//! 1. For [`OWNER_AGENT_TIMEOUT`] nothing changes: paused guests stay paused, because the owner may
//!    still be present.
//! 2. Within this time the resource manager restarts its load watcher, which observes the owner
//!    itself.
//! 3. If it does not, because there is none or because it cannot, this daemon starts a load
//!    watcher, and repeats this every [`OWNER_AGENT_TIMEOUT`] until one runs. The last directive
//!    stays in force until a load watcher sends one.
//! 4. The directive of an agent that is not restarted expires after [`OWNER_AGENT_TIMEOUT`].
//!    Otherwise guests could stay paused forever, because nothing would report that the owner has
//!    left.

use super::tasks::Task;
use super::{Machine, Timer};
use sempa_proto::load::{GuestLimits, LOAD_WATCHER_PROGRAM, is_load_watcher};
use sempa_proto::owner::{GuestAccess, GuestDirective};
use sempa_proto::rm::CTX_RM;
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::BTreeMap;

/// Time for which the last directive of an ended owner agent stays in force. Afterwards, and then
/// at this interval, this daemon starts a load watcher if none runs.
pub(super) const OWNER_AGENT_TIMEOUT: Micros = Micros::from_secs(10);

/// The owner agents of this host.
#[derive(Debug, Default)]
pub(super) struct OwnerAgents {
    /// The last directive of each running agent, by its tid.
    directives: BTreeMap<Tid, GuestDirective>,
    /// Guest limits of the agent that ended last. They apply until a load watcher sends a directive
    /// or the agent's directive expires.
    remaining_limits: Option<(Tid, GuestLimits)>,
    /// True if the load watcher has died and none has been detected since.
    watcher_missing: bool,
    /// True if the event log reports that this daemon starts a load watcher.
    start_reported: bool,
    /// True if the event log reports that this daemon cannot start a load watcher.
    failure_reported: bool,
}

impl OwnerAgents {
    /// Records a directive. `from_watcher` is true if the sender is this host's load watcher, which
    /// considers the wishes of all owners.
    pub(super) fn record_directive(
        &mut self,
        by: Tid,
        directive: &GuestDirective,
        from_watcher: bool,
    ) {
        self.directives.insert(by, directive.clone());
        if from_watcher {
            self.remaining_limits = None;
        }
    }

    /// Returns the guest limits of each agent. All of them apply: an agent that sets no limit does
    /// not cancel the limit of another agent.
    pub(super) fn limits(&self) -> impl Iterator<Item = &GuestLimits> {
        self.directives
            .values()
            .map(|word| &word.limits)
            .chain(self.remaining_limits.iter().map(|(_, limits)| limits))
    }
}

impl Machine {
    /// True if a load watcher runs on this host or is being started.
    fn has_watcher(&self) -> bool {
        let is = |task: &Task| {
            task.is_service && is_load_watcher(&task.name) && task.exit_report.is_none()
        };
        self.tasks.live.values().any(is)
    }

    /// Handles the end of a task that may have been an owner agent.
    pub(super) fn handle_owner_agent_end(&mut self, tid: Tid) {
        let Some(word) = self.owner_control.owner_agents.directives.remove(&tid) else {
            return;
        };
        if word.limits != GuestLimits::default() {
            self.owner_control.owner_agents.remaining_limits = Some((tid, word.limits));
        }
        self.set_timer(OWNER_AGENT_TIMEOUT, Timer::OwnerAgentExpiry(tid));
        if !self.owner_control.is_sent_by(tid) {
            return;
        }
        // The ended agent's directive had replaced that of another agent, without its knowledge.
        // The directive of that other agent applies again.
        if let Some((by, word)) = self.owner_control.owner_agents.directives.pop_last() {
            return self.apply_directive(by, word);
        }
        let seconds = OWNER_AGENT_TIMEOUT.0 / 1_000_000;
        self.log_warning(format!(
            "{tid}, which acted for the owner, has ended; its last directive stays in force for {seconds} s"
        ));
    }

    /// Handles the expiry of the last directive of an ended agent. The directive stays in force if
    /// a load watcher is expected.
    pub(super) fn handle_owner_agent_expiry(&mut self, tid: Tid) {
        let has_left_limits = self
            .owner_control
            .owner_agents
            .remaining_limits
            .as_ref()
            .is_some_and(|(by, _)| *by == tid);
        let stops_guests = self.owner_control.is_sent_by(tid);
        if !has_left_limits && !stops_guests {
            return;
        }
        if self.owner_control.owner_agents.watcher_missing || self.has_watcher() {
            return self.set_timer(OWNER_AGENT_TIMEOUT, Timer::OwnerAgentExpiry(tid));
        }
        if has_left_limits {
            self.owner_control.owner_agents.remaining_limits = None;
        }
        if stops_guests {
            let why = format!("{tid}, which acted for the owner, has ended");
            self.apply_directive(
                tid,
                GuestDirective {
                    access: GuestAccess::Welcome,
                    reason: why,
                    limits: GuestLimits::default(),
                },
            );
            self.owner_control.owner_agents.directives.remove(&tid);
        }
    }

    /// Handles the end of this host's load watcher. Exit status 0 means that it is not needed;
    /// otherwise a new load watcher must be started.
    pub(super) fn handle_watcher_end(&mut self, task: &Task, status: i32) {
        if !task.is_service
            || !is_load_watcher(&task.name)
            || self.shutdown.is_some()
            || self.has_watcher()
        {
            return;
        }
        let was_missing = std::mem::replace(
            &mut self.owner_control.owner_agents.watcher_missing,
            status != 0,
        );
        if status != 0 && !was_missing {
            self.set_timer(OWNER_AGENT_TIMEOUT, Timer::WatcherRestart);
        }
    }

    /// Starts a load watcher if none was started in the meantime. The timer is set again, because
    /// the start may fail.
    pub(super) fn ensure_watcher(&mut self) {
        if self.shutdown.is_some() || !self.owner_control.owner_agents.watcher_missing {
            return;
        }
        if self.has_watcher() {
            let agents = &mut self.owner_control.owner_agents;
            (
                agents.watcher_missing,
                agents.start_reported,
                agents.failure_reported,
            ) = (false, false, false);
            return;
        }
        if !std::mem::replace(&mut self.owner_control.owner_agents.start_reported, true) {
            let text = format!(
                "the load watcher of {} has died; this daemon starts another one",
                self.config.name
            );
            self.log_warning_and_record(text);
        }
        let mut words = vec![LOAD_WATCHER_PROGRAM.to_string()];
        if let Some(rm) = self.rm.current() {
            words.extend([
                "--report-to".to_string(),
                rm.tid.to_string(),
                "--ctx".into(),
                CTX_RM.to_string(),
            ]);
        }
        self.start_command(words);
        self.set_timer(OWNER_AGENT_TIMEOUT, Timer::WatcherRestart);
    }

    /// Reports that a load watcher could not be started.
    pub(super) fn handle_watcher_start_failure(&mut self, error: PvmError) {
        if !std::mem::replace(&mut self.owner_control.owner_agents.failure_reported, true) {
            let stay = if self.owner_control.pauses_guests() {
                "guests stay paused, and "
            } else {
                ""
            };
            let (name, seconds) = (&self.config.name, OWNER_AGENT_TIMEOUT.0 / 1_000_000);
            let text = format!(
                "{LOAD_WATCHER_PROGRAM} could not be started on {name}: {error}; its owner is not protected; \
                 {stay}the start is retried every {seconds} s"
            );
            self.log_warning_and_record(text);
        }
    }
}
