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
//! 3. If the resource manager is missing or cannot restart the load watcher, this daemon starts a
//!    load watcher, and repeats the start every [`OWNER_AGENT_TIMEOUT`] until a load watcher runs.
//!    The last directive stays in force until the load watcher sends one.
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

/// Time for which the last directive of an ended owner agent stays in force. After this time, and
/// then at this interval, this daemon starts a load watcher if none runs.
pub(super) const OWNER_AGENT_TIMEOUT: Micros = Micros::from_secs(10);

/// The owner agents of this host.
#[derive(Debug, Default)]
pub(super) struct OwnerAgents {
    /// The last directive of each running agent, by its tid.
    directives: BTreeMap<Tid, GuestDirective>,
    /// Guest limits of the agent that ended last, with its tid. They apply until a load watcher
    /// sends a directive or the agent's directive expires.
    remaining_limits: Option<(Tid, GuestLimits)>,
    /// True if the load watcher has died and no other load watcher has been detected since.
    watcher_missing: bool,
    /// True if the load watcher was killed because it hung. Another one is started as soon
    /// as it has ended.
    was_watcher_killed: bool,
    /// True if the event log reports that this daemon starts a load watcher.
    is_start_reported: bool,
    /// True if the event log reports that this daemon cannot start a load watcher.
    is_failure_reported: bool,
}

impl OwnerAgents {
    /// Records a directive. `is_from_watcher` is true if the sender is this host's load watcher,
    /// which takes all owners into account; the limits of an ended agent then expire.
    pub(super) fn record_directive(
        &mut self,
        sender: Tid,
        directive: &GuestDirective,
        is_from_watcher: bool,
    ) {
        self.directives.insert(sender, directive.clone());
        if is_from_watcher {
            self.remaining_limits = None;
        }
    }

    /// Returns the guest limits of each agent, including those of an ended agent. All of them
    /// apply: an agent that sets no limit does not cancel the limit of another agent.
    pub(super) fn limits(&self) -> impl Iterator<Item = &GuestLimits> {
        self.directives
            .values()
            .map(|directive| &directive.limits)
            .chain(self.remaining_limits.iter().map(|(_, limits)| limits))
    }
}

impl Machine {
    /// True if a load watcher runs on this host or is being started.
    fn has_watcher(&self) -> bool {
        let is_running_watcher = |task: &Task| {
            task.is_service && is_load_watcher(&task.name) && task.exit_report.is_none()
        };
        self.tasks.live_tasks.values().any(is_running_watcher)
    }

    /// Handles the end of a task that may have been an owner agent. If the agent's directive paused
    /// the guests and another agent has sent a directive, that agent's directive is applied.
    /// Otherwise the last directive stays in force for [`OWNER_AGENT_TIMEOUT`].
    pub(super) fn handle_owner_agent_end(&mut self, tid: Tid) {
        let Some(directive) = self.owner_control.owner_agents.directives.remove(&tid) else {
            return;
        };
        if directive.limits != GuestLimits::default() {
            self.owner_control.owner_agents.remaining_limits = Some((tid, directive.limits));
        }
        self.set_timer(OWNER_AGENT_TIMEOUT, Timer::OwnerDirectiveExpiry(tid));
        if !self.owner_control.is_directive_sender(tid) {
            return;
        }
        // The ended agent's directive had replaced the directive of another agent. The other
        // agent's directive applies again.
        if let Some((sender, directive)) = self.owner_control.owner_agents.directives.pop_last() {
            return self.apply_directive(sender, directive);
        }
        let seconds = OWNER_AGENT_TIMEOUT.0 / 1_000_000;
        self.log_warning(format!(
            "{tid}, which acted for the owner, has ended; its last directive stays in force for {seconds} s"
        ));
    }

    /// Called when the time limit of an ended agent's last directive is reached. Cancels the
    /// directive. If a load watcher runs or is being restarted, the directive stays in force and
    /// the time limit is set again, because the watcher will replace the directive.
    pub(super) fn handle_owner_agent_expiry(&mut self, tid: Tid) {
        let has_remaining_limits = self
            .owner_control
            .owner_agents
            .remaining_limits
            .as_ref()
            .is_some_and(|(agent, _)| *agent == tid);
        let pauses_guests = self.owner_control.is_directive_sender(tid);
        if !has_remaining_limits && !pauses_guests {
            return;
        }
        if self.owner_control.owner_agents.watcher_missing || self.has_watcher() {
            return self.set_timer(OWNER_AGENT_TIMEOUT, Timer::OwnerDirectiveExpiry(tid));
        }
        if has_remaining_limits {
            self.owner_control.owner_agents.remaining_limits = None;
        }
        if pauses_guests {
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

    /// Handles the end of this host's load watcher. Exit status 0 means that no load watcher is
    /// needed; otherwise a new load watcher must be started.
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
        let was_killed = std::mem::take(&mut self.owner_control.owner_agents.was_watcher_killed);
        if status != 0 && !was_missing {
            // A resource manager starts its load watchers again at once.
            let delay = if was_killed && self.rm_state.current().is_none() {
                Micros::default()
            } else {
                OWNER_AGENT_TIMEOUT
            };
            self.set_timer(delay, Timer::WatcherRestart);
        }
    }

    /// Called before a load watcher is killed because it hangs.
    pub(super) fn restart_watcher_soon(&mut self) {
        self.owner_control.owner_agents.was_watcher_killed = true;
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
                agents.is_start_reported,
                agents.is_failure_reported,
            ) = (false, false, false);
            return;
        }
        if !std::mem::replace(&mut self.owner_control.owner_agents.is_start_reported, true) {
            let text = format!(
                "the load watcher of {} has died; this daemon starts another one",
                self.config.host_name
            );
            self.log_warning_and_record(text);
        }
        let mut words = vec![LOAD_WATCHER_PROGRAM.to_string()];
        if let Some(rm) = self.rm_state.current() {
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

    /// Reports that a load watcher could not be started, if this was not reported before.
    pub(super) fn handle_watcher_start_failure(&mut self, error: PvmError) {
        if !std::mem::replace(
            &mut self.owner_control.owner_agents.is_failure_reported,
            true,
        ) {
            let consequence = if self.owner_control.pauses_guests() {
                "guests stay paused, and "
            } else {
                ""
            };
            let (name, seconds) = (&self.config.host_name, OWNER_AGENT_TIMEOUT.0 / 1_000_000);
            let text = format!(
                "{LOAD_WATCHER_PROGRAM} could not be started on {name}: {error}; its owner is not protected; \
                 {consequence}the start is retried every {seconds} s"
            );
            self.log_warning_and_record(text);
        }
    }
}
