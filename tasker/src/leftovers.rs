//! What tasks leave behind: processes that remain after the first process of their task has ended.
//!
//! PVM lets the children of a task that has ended run on. They stay guests of the host: they stop
//! when the owner comes, they are counted and named, and they are killed on request and when the
//! tasker ends. A leftover of a paused task stays stopped. The daemon's lease (see
//! [`crate::lease`]) holds and ends them as it does tasks.
//!
//! If a task ends while it is stopped for a migration, its images may be complete, and copies of
//! its processes may run at the target soon. So what it leaves behind stays stopped until the
//! daemon orders that it runs, or that it is killed.
//!
//! The daemon learns the number of processes from [`FromTasker::LeftBehind`], before it learns of
//! the end of the task.

use crate::census::{Census, CensusFailed, ProcessTree};
use crate::namespace::Namespace;
use crate::pause::Pause;
use crate::stop::{self, TaskProcesses, VforkRule};
use crate::supervisor::Supervisor;
use crate::task::{Output, Task, TaskPhase};
use sempa_proto::Tid;
use sempa_proto::tasker::{FromTasker, REPORTED_PIDS_MAX};
use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// Interval at which leftover processes are counted, and at which it is checked that stopped
/// processes do not run.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Time from the order to stop after which processes that still run are reported.
const REPORT_DELAY: Duration = Duration::from_secs(2);
/// Poll interval of leftovers that are being stopped, until [`REPORT_DELAY`] has passed.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Poll interval of leftovers that have not stopped within [`REPORT_DELAY`].
const SLOW_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The processes that a task has left behind.
#[derive(Debug)]
enum Remains {
    /// The task had a PID namespace, which ends with its last process.
    Namespace(Namespace),
    /// The task had no PID namespace.
    Tree(ProcessTree),
}

impl Remains {
    fn processes(&self) -> TaskProcesses<'_> {
        match self {
            Self::Namespace(namespace) => TaskProcesses::Namespace(namespace),
            Self::Tree(tree) => TaskProcesses::Tree(tree),
        }
    }

    /// Returns the PIDs of the processes that have not ended.
    ///
    /// # Errors
    /// The processes could not be read.
    fn living_pids(&self, census: &Census) -> Result<Vec<i32>, CensusFailed> {
        let mut pids = self.processes().try_pids_in(census)?;
        pids.retain(|pid| !stop::has_ended(*pid));
        Ok(pids)
    }

    fn kill(&self, census: &Census) {
        match self {
            Self::Namespace(namespace) => namespace.kill_processes(),
            Self::Tree(tree) => {
                tree.kill_group();
                stop::kill(&self.processes().pids_in(census));
            }
        }
    }
}

/// Whether leftover processes may run.
#[derive(Debug)]
enum RunPermission {
    Running,
    /// Ordered to stop; some processes may still run.
    Stopping {
        ordered_at: Instant,
        is_delay_reported: bool,
    },
    Stopped,
    /// Killed; the processes execute no further instruction.
    Killed,
}

/// The processes that one task has left behind.
#[derive(Debug)]
struct Leftover {
    tid: Tid,
    remains: Remains,
    /// The task's output. The tasker reads and discards it, so that writers neither block nor
    /// receive SIGPIPE.
    output: Option<Output>,
    /// Messages to send when the last process has ended.
    final_messages: Vec<FromTasker>,
    permission: RunPermission,
    /// True if the processes are stopped only because the lease does not permit them to run.
    is_held: bool,
    /// True if the control group, if there is one, must be frozen and this has not succeeded.
    must_freeze: bool,
    /// Processes that received SIGSTOP because no control group could be frozen.
    signalled_pids: BTreeSet<i32>,
    /// Processes, by their PIDs in the namespace, that were stopped for other reasons.
    already_stopped_pids: Vec<i32>,
    /// Number of processes in the last report to the daemon; 0 if nothing was reported.
    reported_count: u32,
}

impl Leftover {
    /// Describes processes of which nothing was reported, without output.
    fn new(tid: Tid, remains: Remains, permission: RunPermission) -> Self {
        Self {
            tid,
            remains,
            output: None,
            final_messages: Vec::new(),
            permission,
            is_held: false,
            must_freeze: false,
            signalled_pids: BTreeSet::new(),
            already_stopped_pids: Vec::new(),
            reported_count: 0,
        }
    }

    /// Stops the processes. They count as stopped after [`Leftover::check_stopping`].
    fn order_stop(&mut self) {
        if !matches!(self.permission, RunPermission::Running) {
            return;
        }
        self.begin_stopping();
        self.must_freeze = true;
        self.start_freeze();
    }

    /// Freezes the control group, if there is one. If this fails because the group was removed, or
    /// because no descriptor is free, the processes are stopped by signals until it succeeds.
    fn start_freeze(&mut self) {
        if let Remains::Namespace(namespace) = &self.remains
            && let Some(group) = namespace.complete_control_group()
            && group.start_freeze().is_ok()
        {
            let signalled_pids = std::mem::take(&mut self.signalled_pids).into_iter();
            namespace.record_signalled(stop::without_already_stopped(
                signalled_pids.collect(),
                &self.already_stopped_pids,
            ));
            self.must_freeze = false;
        }
    }

    fn begin_stopping(&mut self) {
        self.permission = RunPermission::Stopping {
            ordered_at: Instant::now(),
            is_delay_reported: false,
        };
    }

    /// Stops by signals the processes that run although they were stopped by signals: an engine
    /// that has died may have continued them.
    fn stop_stragglers(&mut self, census: &Census) {
        if !matches!(
            self.permission,
            RunPermission::Stopping { .. } | RunPermission::Stopped
        ) {
            return;
        }
        let mut signalled_pids = BTreeSet::new();
        let (processes, rule) = (self.remains.processes(), VforkRule::ChildRuns);
        stop::signal_running(&processes, census, &mut signalled_pids, rule);
        self.signalled_pids.append(&mut signalled_pids);
    }

    /// Stops the processes because the lease does not permit them to run.
    fn hold(&mut self) {
        if self.is_counted() && matches!(self.permission, RunPermission::Running) {
            self.is_held = true;
            self.order_stop();
        }
    }

    /// Lets the processes run on the daemon's order. While the lease permits no process to run,
    /// stopped processes stay stopped until the lease is renewed.
    fn resume_unless_frozen(&mut self, is_frozen: bool, census: &Census) {
        self.is_held = is_frozen
            && matches!(
                self.permission,
                RunPermission::Stopping { .. } | RunPermission::Stopped
            );
        if !self.is_held {
            self.resume(census);
        }
    }

    /// Lets the processes run, except those that were stopped for other reasons. `census` must be
    /// younger than their stop.
    fn resume(&mut self, census: &Census) {
        if matches!(
            self.permission,
            RunPermission::Running | RunPermission::Killed
        ) {
            return;
        }
        self.permission = RunPermission::Running;
        self.must_freeze = false;
        if let Remains::Namespace(namespace) = &self.remains {
            namespace.thaw(census);
        }
        self.continue_signalled(census);
    }

    /// Sends SIGCONT to the processes that received SIGSTOP.
    fn continue_signalled(&mut self, census: &Census) {
        let signalled_pids = std::mem::take(&mut self.signalled_pids);
        if signalled_pids.is_empty() {
            return;
        }
        // Another process may have the PID of a process that has ended.
        let mut pids = self.remains.processes().pids_in(census);
        pids.retain(|pid| signalled_pids.contains(pid));
        for pid in stop::without_already_stopped(pids, &self.already_stopped_pids) {
            let _ = crate::sys::send_signal(pid, libc::SIGCONT);
        }
    }

    fn kill(&mut self, census: &Census) {
        self.permission = RunPermission::Killed;
        self.remains.kill(census);
    }

    /// Checks whether processes that were ordered to stop have stopped.
    fn check_stopping(&mut self, census: &Census) -> Option<FromTasker> {
        if self.must_freeze && matches!(self.permission, RunPermission::Stopping { .. }) {
            self.start_freeze();
        }
        let RunPermission::Stopping {
            ordered_at,
            is_delay_reported,
        } = &mut self.permission
        else {
            return None;
        };
        let frozen_namespace = match &self.remains {
            Remains::Namespace(namespace) => namespace.frozen_group().map(|g| (namespace, g)),
            Remains::Tree(_) => None,
        };
        let has_stopped = match frozen_namespace {
            Some((namespace, group)) => namespace
                .signal_outside(group, census)
                .is_some_and(|seen| namespace.is_frozen(group, &seen, &Census::default())),
            None => {
                let (processes, rule) = (self.remains.processes(), VforkRule::ChildStops);
                stop::signal_running(&processes, census, &mut self.signalled_pids, rule)
                    .is_some_and(|seen| seen.are_all(&processes, &Census::default()))
            }
        };
        if has_stopped {
            self.permission = RunPermission::Stopped;
            // The daemon has not ordered a stop of held processes, so it expects no report.
            return (!self.is_held).then_some(FromTasker::LeftoversStopped { tid: self.tid });
        }
        if self.is_held || *is_delay_reported || ordered_at.elapsed() < REPORT_DELAY {
            return None;
        }
        *is_delay_reported = true;
        let mut pids = match frozen_namespace {
            Some((namespace, group)) => namespace.unstopped_pids(group, census),
            None => stop::running_pids(&self.remains.processes().pids_in(census)),
        };
        pids.truncate(REPORTED_PIDS_MAX);
        Some(FromTasker::NotStopped {
            tid: self.tid,
            pids,
        })
    }

    /// Orders stopped processes again to stop if one of them runs, for example because another
    /// program has continued it or has moved it out of the control group.
    fn verify_stopped(&mut self, census: &Census) {
        if !matches!(self.permission, RunPermission::Stopped) {
            return;
        }
        let processes = self.remains.processes().without_frozen();
        let pids = processes.try_pids_in(census);
        let Ok(running_pids) = pids.map(|pids| stop::executing_pids(&pids)) else {
            // Processes that cannot be read do not count as stopped.
            return self.begin_stopping();
        };
        if !running_pids.is_empty() {
            if let Remains::Namespace(namespace) = &self.remains {
                namespace.forget_stopped_outside(&running_pids);
            }
            self.signalled_pids
                .retain(|pid| !running_pids.contains(pid));
            self.begin_stopping();
        }
    }

    /// Counts the processes again. Processes that are absent from the census although they exist,
    /// because they fork and exit in turns, count as one.
    fn count_again(&mut self, census: &Census) -> Option<FromTasker> {
        let has_left = match &self.remains {
            Remains::Namespace(namespace) => namespace.has_left_processes(census),
            Remains::Tree(tree) => tree.has_left_group(),
        };
        self.count(census, u32::from(has_left))
    }

    /// Counts the processes, of which at least `count_min` exist. Returns a report if their number
    /// has changed.
    fn count(&mut self, census: &Census, count_min: u32) -> Option<FromTasker> {
        let mut pids = self.remains.living_pids(census).ok()?;
        let process_count = u32::try_from(pids.len()).unwrap_or(u32::MAX).max(count_min);
        if process_count == self.reported_count || process_count == 0 {
            return None;
        }
        self.reported_count = process_count;
        pids.truncate(REPORTED_PIDS_MAX);
        Some(FromTasker::LeftBehind {
            tid: self.tid,
            process_count,
            pids,
        })
    }

    /// True if the daemon must know of the processes. The others are about to end.
    fn is_counted(&self) -> bool {
        self.tid.is_task()
    }

    /// True if the last process has ended.
    fn has_ended(&self, census: &Census) -> bool {
        match &self.remains {
            Remains::Namespace(namespace) => namespace.has_ended(),
            // Processes that fork and exit in turns may be absent from one census.
            Remains::Tree(tree) => {
                let is_empty = |census: &Census| {
                    let pids = self.remains.living_pids(census);
                    pids.is_ok_and(|pids| pids.is_empty())
                };
                tree.has_group_ended() && is_empty(census) && is_empty(&Census::default())
            }
        }
    }

    fn stop_check_delay(&self) -> Option<Duration> {
        let RunPermission::Stopping { ordered_at, .. } = &self.permission else {
            return None;
        };
        Some(match ordered_at.elapsed() < REPORT_DELAY {
            true => STOP_POLL_INTERVAL,
            false => SLOW_POLL_INTERVAL,
        })
    }
}

/// All leftover processes of this host.
#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    items: Vec<Leftover>,
    /// Time of the next count; `None` if nothing needs to be counted.
    next_check_at: Option<Instant>,
    /// True if a process without a namespace may have ended.
    tree_may_have_ended: bool,
}

impl Leftovers {
    /// Returns the descriptor of each namespace that becomes readable at its end.
    pub(crate) fn namespace_ends(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.items.iter().filter_map(|item| match &item.remains {
            Remains::Namespace(namespace) => Some(namespace.init_pidfd()),
            Remains::Tree(_) => None,
        })
    }

    /// Returns the outputs that must be read, each with its index for
    /// [`Leftovers::discard_output`].
    pub(crate) fn outputs(&self) -> impl Iterator<Item = (usize, BorrowedFd<'_>)> {
        self.items
            .iter()
            .enumerate()
            .filter_map(|(index, item)| Some((index, item.output.as_ref()?.fd()?)))
    }

    /// Reads and discards output.
    pub(crate) fn discard_output(&mut self, index: usize) {
        let output = self
            .items
            .get_mut(index)
            .and_then(|item| item.output.as_mut());
        if let Some(output) = output {
            output.read_chunks(drop);
        }
    }

    /// Kills all leftover processes, because the tasker ends.
    pub(crate) fn kill_all(&mut self) {
        let census = Census::default();
        self.items.iter_mut().for_each(|item| item.kill(&census));
    }

    /// Stops all leftover processes because the lease does not permit them to run.
    pub(crate) fn hold_all(&mut self) {
        self.items.iter_mut().for_each(Leftover::hold);
    }

    /// Lets the processes run that are stopped only because the lease had not been renewed.
    pub(crate) fn resume_held(&mut self) {
        let census = Census::default();
        for item in self.items.iter_mut().filter(|item| item.is_held) {
            item.is_held = false;
            item.resume(&census);
        }
    }

    /// True if no process of an ended task may exist.
    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Returns the number of ended tasks of which processes may exist.
    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    /// Returns the number of ended tasks that have left processes which were not killed.
    pub(crate) fn ended_task_count(&self) -> usize {
        self.counted().count()
    }

    /// Returns the ended tasks that have left processes which were not killed, with the PIDs of
    /// these processes.
    pub(crate) fn living_pids_of_ended(
        &self,
        census: &Census,
    ) -> impl Iterator<Item = (Tid, Vec<i32>)> {
        self.counted().map(|item| {
            // Processes that cannot be read count when they can be read again.
            let pids = item.remains.living_pids(census).unwrap_or_default();
            (item.tid, pids)
        })
    }

    fn counted(&self) -> impl Iterator<Item = &Leftover> {
        self.items
            .iter()
            .filter(|item| item.is_counted() && !matches!(item.permission, RunPermission::Killed))
    }

    /// Records that a child of the tasker has ended.
    pub(crate) fn record_child_end(&mut self) {
        self.tree_may_have_ended = true;
    }

    /// Returns the time until [`Supervisor::check_leftovers`] must be called; `None` if no call is
    /// needed.
    pub(crate) fn check_delay(&self) -> Option<Duration> {
        let count_delay = self
            .next_check_at
            .map(|at| at.saturating_duration_since(Instant::now()));
        let stop_delays = self.items.iter().filter_map(Leftover::stop_check_delay);
        stop_delays.chain(count_delay).min()
    }
}

impl Supervisor {
    /// Takes over what a task leaves behind whose first process was reaped, and reports it. A task
    /// that leaves no process behind returns its namespace to the spare ones. `census` must be
    /// younger than the end of the first process.
    pub(crate) fn take_over_leftovers(&mut self, mut task: Task, census: &Census) {
        let has_left_processes = match &task.namespace {
            Some(namespace) => namespace.has_left_processes(census),
            None => {
                task.tree.record_first_reaped();
                // The tasker adopts orphans, so without an unknown child nothing is left outside
                // the group.
                let is_one_left = || {
                    let pids = census.tree_pids(&task.tree);
                    pids.map_or(true, |pids| !pids.is_empty())
                };
                !task.tree.has_group_ended() || (self.has_unowned_child() && is_one_left())
            }
        };
        let must_stop = !task.pause.is_inactive();
        let (was_stopped_by_signals, phase_stops) = (
            task.frozen_group().is_none(),
            !matches!(task.phase, TaskPhase::Running),
        );
        // Copies of the processes may run at the target soon.
        let may_have_copies = matches!(
            task.phase,
            TaskPhase::Stopped { .. } | TaskPhase::Dumping { .. } | TaskPhase::ServingMemory { .. }
        );
        let pause = std::mem::take(&mut task.pause);
        let pause_stops = matches!(pause, Pause::Stopping { .. } | Pause::Paused);
        pause.restore_priorities(&task, census);
        // Every process without an earlier stop signal may have received one.
        let signalled_pids = match was_stopped_by_signals && (pause_stops || phase_stops) {
            true => task.processes().pids_in(census).into_iter().collect(),
            false => BTreeSet::new(),
        };
        if !has_left_processes {
            if let Some(namespace) = task.namespace.take() {
                namespace.thaw(census);
                self.end_empty_namespace(namespace, task.output, census);
            }
            return;
        }
        let remains = match task.namespace.take() {
            Some(namespace) => {
                namespace.end_when_empty();
                Remains::Namespace(namespace)
            }
            None => Remains::Tree(task.tree),
        };
        let mut leftover = Leftover {
            output: Some(task.output),
            is_held: task.is_held && !may_have_copies,
            signalled_pids,
            already_stopped_pids: task.already_stopped_pids,
            ..Leftover::new(task.tid, remains, RunPermission::Stopped)
        };
        if may_have_copies {
            // They are not frozen: an engine that is being cancelled could not leave them then.
            leftover.begin_stopping();
            leftover.stop_stragglers(census);
        } else if must_stop {
            // What is frozen stays frozen. Everything else is stopped now.
            leftover.permission = RunPermission::Running;
            leftover.order_stop();
        } else {
            leftover.resume(census);
        }
        if let Some(report) = leftover.count(census, 0) {
            self.send(&report);
        }
        self.leftovers.items.push(leftover);
        self.schedule_check();
    }

    /// Reuses the namespace of a task that has left nothing behind, or ends it.
    fn end_empty_namespace(&mut self, namespace: Namespace, output: Output, census: &Census) {
        if let Some(namespace) = self.spare_namespaces.recycle_namespace(namespace, census) {
            namespace.end_when_empty();
            self.leftovers.items.push(Leftover {
                output: Some(output),
                ..Leftover::new(
                    Tid::NONE,
                    Remains::Namespace(namespace),
                    RunPermission::Running,
                )
            });
        }
    }

    /// Kills all processes in a namespace. Sends `final_messages` when they have ended.
    pub(crate) fn kill_namespace(&mut self, namespace: Namespace, final_messages: Vec<FromTasker>) {
        namespace.kill_processes();
        self.leftovers.items.push(Leftover {
            final_messages,
            ..Leftover::new(
                Tid::NONE,
                Remains::Namespace(namespace),
                RunPermission::Killed,
            )
        });
    }

    pub(crate) fn stop_leftovers(&mut self, tid: Tid) {
        let mut are_stopped = true;
        for leftover in self.leftovers.of_task(tid) {
            leftover.order_stop();
            leftover.is_held = false;
            are_stopped &= matches!(leftover.permission, RunPermission::Stopped);
        }
        if are_stopped {
            self.send(&FromTasker::LeftoversStopped { tid });
        }
        self.check_leftovers();
    }

    pub(crate) fn resume_leftovers(&mut self, tid: Tid) {
        let is_frozen = self.lease.is_frozen();
        let census = Census::default();
        for leftover in self.leftovers.of_task(tid) {
            leftover.resume_unless_frozen(is_frozen, &census);
        }
    }

    /// Stops the leftover processes of a task again that an engine has continued. Called when the
    /// engine's worker has ended after the end of the task.
    pub(crate) fn stop_leftover_stragglers(&mut self, tid: Tid) {
        let census = Census::default();
        for leftover in self.leftovers.of_task(tid) {
            leftover.stop_stragglers(&census);
        }
        self.check_leftovers();
    }

    pub(crate) fn kill_leftovers(&mut self, tid: Tid) {
        let census = Census::default();
        for leftover in self.leftovers.of_task(tid) {
            leftover.kill(&census);
        }
    }

    fn schedule_check(&mut self) {
        let is_needed =
            self.leftovers.items.iter().any(Leftover::is_counted) || self.has_paused_task();
        self.leftovers.next_check_at = match self.leftovers.next_check_at {
            Some(at) if is_needed => Some(at),
            _ => is_needed.then(|| Instant::now() + CHECK_INTERVAL),
        };
    }

    /// Removes leftovers that have ended, checks those that are being stopped, and counts the
    /// others when a count is due.
    pub(crate) fn check_leftovers(&mut self) {
        self.schedule_check();
        let is_count_due = self
            .leftovers
            .next_check_at
            .is_some_and(|at| at <= Instant::now());
        let tree_may_have_ended =
            std::mem::take(&mut self.leftovers.tree_may_have_ended) || is_count_due;
        let census = Census::default();
        let mut messages = Vec::new();
        self.leftovers.items.retain_mut(|item| {
            let is_checked = tree_may_have_ended || matches!(item.remains, Remains::Namespace(_));
            if is_checked && item.has_ended(&census) {
                if item.reported_count > 0 {
                    messages.push(FromTasker::LeftBehind {
                        tid: item.tid,
                        process_count: 0,
                        pids: Vec::new(),
                    });
                }
                messages.append(&mut item.final_messages);
                return false;
            }
            messages.extend(item.check_stopping(&census));
            if is_count_due {
                item.verify_stopped(&census);
                if matches!(item.permission, RunPermission::Killed) {
                    // A process may have been created while the others were killed.
                    item.remains.kill(&census);
                }
                if item.is_counted() {
                    messages.extend(item.count_again(&census));
                }
            }
            true
        });
        if is_count_due {
            self.verify_pauses(&census);
            self.leftovers.next_check_at = None;
            self.schedule_check();
        }
        for message in messages {
            self.send(&message);
        }
    }
}

impl Leftovers {
    fn of_task(&mut self, tid: Tid) -> impl Iterator<Item = &mut Leftover> {
        self.items.iter_mut().filter(move |item| item.tid == tid)
    }
}
