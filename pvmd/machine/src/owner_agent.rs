//! Owner agents: tasks that direct the guests of this host on behalf of its owner. An owner agent
//! is the host's load watcher or a program of the user.
//!
//! Every daemon starts a load watcher of its own, so that guests stop for the owner also without a
//! resource manager. A host has one load watcher for each virtual machine: where a resource
//! manager is known, it has [`OWNER_AGENT_TIMEOUT`] to start one first; if it starts one later,
//! the daemon's own ends as soon as the other one has sent its first directive.
//!
//! When an owner agent ends, its last directive stays in force:
//!
//! 1. For [`OWNER_AGENT_TIMEOUT`] nothing changes: paused guests stay paused, because the owner may
//!    still be present.
//! 2. Without a resource manager this daemon starts another load watcher at once, later at growing
//!    intervals if each one ends soon.
//! 3. Within [`OWNER_AGENT_TIMEOUT`] a resource manager restarts its load watcher. If the resource
//!    manager cannot restart it, this daemon starts one, and repeats the start every
//!    [`OWNER_AGENT_TIMEOUT`] until a load watcher runs.
//! 4. The last directive stays in force until a load watcher sends one. The directive of an agent
//!    that is not restarted expires after [`OWNER_AGENT_TIMEOUT`]. Otherwise guests could stay
//!    paused forever, because nothing would report that the owner has left.
//!
//! A load watcher that ends with status 0 has read that the owner or the administrator wants none.
//! Only a load watcher can read this, so another one looks every [`SWITCHED_OFF_CHECK_INTERVAL`].

use super::spawn::ExecRequester;
use super::tasks::Task;
use super::{Machine, Timer};
use sempa_proto::load::{GuestLimits, LOAD_WATCHER_PROGRAM, is_load_watcher};
use sempa_proto::owner::{GuestAccess, GuestDirective};
use sempa_proto::rm::CTX_RM;
use sempa_proto::task::{SPAWN_NO_PARENT, SPAWN_PINNED, SpawnRequest};
use sempa_proto::tasker::ToTasker;
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::BTreeMap;

/// Time for which the last directive of an ended owner agent stays in force. After this time, and
/// then at this interval, this daemon starts a load watcher if none runs.
pub(super) const OWNER_AGENT_TIMEOUT: Micros = Micros::from_secs(10);
/// Time after which this daemon starts its load watcher again after a short run. Doubles with each
/// short run, up to [`OWNER_AGENT_TIMEOUT`].
const WATCHER_RETRY_MIN: Micros = Micros::from_millis(250);
/// Minimum run time of a load watcher that ends later than a start that has failed.
const LONG_RUN_MIN: Micros = Micros::from_secs(30);
/// Number of short runs in a row after which an event reports that the owner is not protected.
const SHORT_RUNS_MAX: u32 = 3;
/// Time limit for a load watcher to send its first directive and to announce that it answers.
pub(super) const WATCHER_START_TIMEOUT: Micros = Micros::from_secs(10);
/// Interval at which this daemon starts a load watcher that may find that it is wanted again.
pub(super) const SWITCHED_OFF_CHECK_INTERVAL: Micros = Micros::from_secs(300);
/// Environment of a load watcher: the owner's hours are in the time zone of the machine, whatever
/// the user of the virtual machine has set.
const MACHINE_ZONE_VARIABLE: &[u8] = b"TZ=:/etc/localtime";

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
    /// True if this daemon must start a load watcher when the timer fires, although none has died:
    /// a resource manager may start one first, or the owner's side has wanted none.
    starts_later: bool,
    /// Time at which this daemon has started its last load watcher.
    last_start_at: Micros,
    /// Number of load watchers in a row that have ended soon after their start.
    short_run_count: u32,
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
    /// Returns the load watchers of this host that run or are being started.
    fn watchers(&self) -> impl Iterator<Item = &Task> {
        let is_running_watcher = |task: &&Task| {
            task.is_service && is_load_watcher(&task.name) && task.exit_report.is_none()
        };
        self.tasks.live_tasks.values().filter(is_running_watcher)
    }

    /// True if a load watcher runs on this host or is being started.
    fn has_watcher(&self) -> bool {
        self.watchers().next().is_some()
    }

    /// True if `tid` is the load watcher that this daemon has started, and a resource manager's
    /// load watcher has sent a directive.
    pub(super) fn is_superseded_watcher(&self, tid: Tid) -> bool {
        let directives = &self.owner_control.owner_agents.directives;
        self.tasks.get(tid).is_some_and(|task| task.is_own_watcher)
            && self
                .watchers()
                .any(|task| !task.is_own_watcher && directives.contains_key(&task.tid))
    }

    /// Ends the load watcher that this daemon has started if another load watcher has sent a
    /// directive. Its own directive ends, too.
    pub(super) fn end_superseded_watcher(&mut self) {
        let own_watchers = self.watchers().filter(|task| task.is_own_watcher);
        let own_watchers: Vec<Tid> = own_watchers.map(|task| task.tid).collect();
        for tid in own_watchers {
            if self.is_superseded_watcher(tid) {
                self.owner_control.owner_agents.directives.remove(&tid);
                self.forget_service(tid);
                self.send_to_tasker(ToTasker::Kill { tid });
            }
        }
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

    /// Handles the end of this host's load watcher. Exit status 0 means that the owner's side wants
    /// no load watcher; otherwise a new load watcher must be started.
    pub(super) fn handle_watcher_end(&mut self, task: &Task, status: i32) {
        if !task.is_service
            || !is_load_watcher(&task.name)
            || self.shutdown.is_some()
            || self.has_watcher()
        {
            return;
        }
        let (now, has_rm) = (self.now, self.rm_state.current().is_some());
        let agents = &mut self.owner_control.owner_agents;
        let was_missing = std::mem::replace(&mut agents.watcher_missing, status != 0);
        let was_killed = std::mem::take(&mut agents.was_watcher_killed);
        agents.starts_later = status == 0 && task.is_own_watcher;
        if status == 0 {
            agents.short_run_count = 0;
            if task.is_own_watcher {
                self.set_timer(SWITCHED_OFF_CHECK_INTERVAL, Timer::WatcherRestart);
            }
            return;
        }
        let is_long_run = now.since(agents.last_start_at) >= LONG_RUN_MIN;
        if is_long_run || !task.is_own_watcher {
            agents.short_run_count = 0;
        }
        // A resource manager starts its load watchers again at once.
        let delay = match has_rm {
            true if was_missing => return,
            true => OWNER_AGENT_TIMEOUT,
            false if was_killed => Micros::default(),
            false => Micros(
                (WATCHER_RETRY_MIN.0 << agents.short_run_count.min(12)).min(OWNER_AGENT_TIMEOUT.0),
            ),
        };
        agents.short_run_count = agents.short_run_count.saturating_add(1);
        let must_report = agents.short_run_count == SHORT_RUNS_MAX;
        self.set_timer(delay, Timer::WatcherRestart);
        if must_report {
            let text = format!(
                "the load watcher of {} ended soon after its start {SHORT_RUNS_MAX} times in a row: its owner is not \
                 protected; its output is in the master's log; it is started again",
                self.config.host_name
            );
            self.log_warning_and_record(text);
        }
    }

    /// Called before a load watcher is killed because it hangs.
    pub(super) fn restart_watcher_soon(&mut self) {
        self.owner_control.owner_agents.was_watcher_killed = true;
    }

    /// Starts a load watcher if none was started in the meantime. The timer is set again, because
    /// the start may fail.
    pub(super) fn ensure_watcher(&mut self) {
        let has_watcher = self.has_watcher();
        let agents = &mut self.owner_control.owner_agents;
        if self.shutdown.is_some() || !(agents.watcher_missing || agents.starts_later) {
            return;
        }
        if has_watcher {
            (
                agents.watcher_missing,
                agents.starts_later,
                agents.is_start_reported,
                agents.is_failure_reported,
            ) = (false, false, false, false);
            return;
        }
        if self.tasker_has_ended {
            return self.set_timer(OWNER_AGENT_TIMEOUT, Timer::WatcherRestart);
        }
        let is_first_attempt = !std::mem::replace(&mut agents.is_start_reported, true);
        if agents.watcher_missing && is_first_attempt {
            let text = format!(
                "the load watcher of {} has died; this daemon starts another one",
                self.config.host_name
            );
            self.log_warning_and_record(text);
        }
        self.start_own_watcher();
        self.set_timer(OWNER_AGENT_TIMEOUT, Timer::WatcherRestart);
    }

    /// Starts a load watcher on a host that has none yet. A resource manager, which also runs or is
    /// about to be started, has time to start one first.
    pub(super) fn start_first_watcher(&mut self) {
        if self.rm_state.current().is_none() && self.config.rm_command.is_none() {
            return self.start_own_watcher();
        }
        self.owner_control.owner_agents.starts_later = true;
        self.set_timer(OWNER_AGENT_TIMEOUT, Timer::WatcherRestart);
    }

    /// Starts a load watcher of this daemon, unless one runs.
    pub(super) fn start_own_watcher(&mut self) {
        if self.shutdown.is_some() || self.has_watcher() {
            return;
        }
        let mut args = vec!["--ctx".to_string(), CTX_RM.to_string()];
        // A resource manager that serves all requests, as PVM's do, does not know reports.
        if let Some(rm) = self.rm_state.current()
            && !rm.services.vm_requests
        {
            args.extend(["--report-to".to_string(), rm.tid.to_string()]);
        }
        let request = SpawnRequest {
            program: LOAD_WATCHER_PROGRAM.to_string(),
            args: args.into_iter().map(String::into_bytes).collect(),
            env: vec![MACHINE_ZONE_VARIABLE.to_vec()],
            flags: SPAWN_NO_PARENT | SPAWN_PINNED,
            task_count: 1,
            ..SpawnRequest::default()
        };
        self.queue_exec(Tid::NONE, request, ExecRequester::OwnWatcher);
    }

    /// Records the start of a load watcher of this daemon.
    pub(super) fn handle_watcher_started(&mut self, tid: Tid) {
        self.owner_control.owner_agents.last_start_at = self.now;
        self.set_timer(WATCHER_START_TIMEOUT, Timer::WatcherStartTimeout(tid));
    }

    /// Kills a load watcher that has not announced itself in time.
    pub(super) fn handle_watcher_start_timeout(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get(tid) else {
            return;
        };
        if task.exit_report.is_some() || self.is_supervised(tid) || self.shutdown.is_some() {
            return;
        }
        // While the lease permits no task to run, the load watcher is frozen, too.
        if self.is_lease_frozen() {
            return self.set_timer(WATCHER_START_TIMEOUT, Timer::WatcherStartTimeout(tid));
        }
        let text = format!(
            "load watcher {tid} of {} has not begun to watch within {} s: the owner was not protected; it is killed and \
             started again",
            self.config.host_name,
            WATCHER_START_TIMEOUT.0 / 1_000_000
        );
        self.log_warning_and_record(text);
        self.send_to_tasker(ToTasker::Kill { tid });
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
        let agents = &mut self.owner_control.owner_agents;
        if !std::mem::replace(&mut agents.watcher_missing, true) {
            self.set_timer(OWNER_AGENT_TIMEOUT, Timer::WatcherRestart);
        }
    }
}
