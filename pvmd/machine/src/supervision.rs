//! Supervises the programs of this host whose work a promise needs: the tasker, the load watcher
//! and the resource manager. A program that hangs keeps its connection open, so only its messages
//! and requests show that it runs.
//!
//! Every [`CHECK_INTERVAL`] this daemon asks each of them for a sign of life, if its promise needs
//! the program then:
//!
//! - **Load watcher**. If it is silent for [`SILENT_CHECKS_MAX`] checks, it is killed and started
//!   again. While this host has no guests, it is asked only every [`IDLE_CHECKS`] checks.
//! - **Resource manager**. If it is silent for as long, it is not the resource manager any more, so
//!   that spawns are placed round robin, and it is killed; the configured one is started again. One
//!   that a user has started from a command line is not killed, and is registered again when it
//!   answers. While it waits for the reply to a request, which may concern a host that hangs, it is
//!   not asked.
//! - **Tasker**, while it has tasks. If it is silent for as long while guests must stop for the
//!   owner, an event reports that they are not stopped, and the tasker is killed with all its
//!   tasks. Otherwise it has time until [`SILENT_TASKER_CHECKS_MAX`].
//!
//! A check counts as silent only if the question was asked at an earlier check. So a hang of this
//! daemon adds at most one silent check, and a program on a loaded machine has the whole time. Any
//! message or request of a program is an answer: a resource manager with a long queue reads the
//! question late.
//!
//! Load watchers and resource managers announce that they answer, by
//! [`SM_ALIVE`](sempa_proto::sm::SM_ALIVE). Others, written for PVM, do not know the question and
//! are not supervised.

use super::guest_stops::GUEST_STOP_TIMEOUT;
use super::tasks::Task;
use super::{Machine, Timer};
use bytes::Bytes;
use sempa_proto::event::EventKind;
use sempa_proto::load::is_load_watcher;
use sempa_proto::rm::{CTX_RM, TAG_PING};
use sempa_proto::task::RmInfo;
use sempa_proto::tasker::ToTasker;
use sempa_proto::{Micros, Tid};
use std::collections::BTreeMap;

/// Interval between two checks.
const CHECK_INTERVAL: Micros = Micros::from_secs(1);
/// Number of checks without an answer after which a program hangs: two seconds.
const SILENT_CHECKS_MAX: u32 = 2;
/// The same for a tasker while no guest must stop: a minute. The tasker answers nothing while it
/// starts a program on a slow file system, which may take three seconds, and its end ends all
/// tasks. While it hangs, only this daemon could end the tasks of a host that is cut off.
const SILENT_TASKER_CHECKS_MAX: u32 = 60;

/// Number of checks per question to a load watcher of a host without guests, where it protects
/// nothing yet.
const IDLE_CHECKS: u32 = 5;

/// What this daemon knows about the answers of one program.
#[derive(Clone, Copy, Debug, Default)]
struct Answers {
    /// True if the program was asked and has not answered.
    is_asked: bool,
    /// Number of checks since the question.
    silent_checks: u32,
}

impl Answers {
    /// Counts a check. Returns true if the program must be asked.
    fn count_check(&mut self) -> bool {
        if self.is_asked {
            self.silent_checks += 1;
        }
        !std::mem::replace(&mut self.is_asked, true)
    }

    fn is_silent(&self) -> bool {
        self.silent_checks >= SILENT_CHECKS_MAX
    }
}

/// A load watcher or resource manager that answers questions.
#[derive(Clone, Copy, Debug, Default)]
struct Service {
    answers: Answers,
    /// Number of checks since the last question that were omitted.
    omitted_checks: u32,
    /// The registration that a silent resource manager has lost.
    lost_registration: Option<RmInfo>,
}

/// The supervised programs of this host.
#[derive(Debug, Default)]
pub(super) struct Supervision {
    tasker: Answers,
    /// Contains only tasks of this host that have announced that they answer.
    services: BTreeMap<Tid, Service>,
}

impl Machine {
    /// Asks the supervised programs for a sign of life, and handles those that hang. Sets
    /// the timer for the next check.
    pub(super) fn check_partners(&mut self) {
        self.set_timer(CHECK_INTERVAL, Timer::PartnerCheck);
        // While the lease permits no task to run, the tasker has stopped the services, too.
        if self.shutdown.is_some() || self.is_lease_frozen() {
            self.forget_tasker_question();
            let services = self.supervision.services.values_mut();
            services.for_each(|service| service.answers = Answers::default());
            return;
        }
        self.check_tasker();
        let services: Vec<Tid> = self.supervision.services.keys().copied().collect();
        for tid in services {
            self.check_service(tid);
        }
    }

    // ---- Load watcher and resource manager

    /// Handles a service's announcement that it answers, or its answer.
    pub(super) fn handle_alive(&mut self, tid: Tid) {
        let is_service = self.rm_state.is_own(tid) || self.is_watcher(tid);
        if !is_service && !self.supervision.services.contains_key(&tid) {
            return self.log_warning(format!(
                "{tid} is neither load watcher nor resource manager of this host; its message was dropped"
            ));
        }
        let service = self.supervision.services.entry(tid).or_default();
        if let Some(rm) = service.lost_registration.take()
            && self.rm_state.own().is_none()
        {
            self.log_and_record(format!("resource manager {tid} answers again"));
            self.record_event(EventKind::RmRegistered { tid });
            self.replace_own_rm(Some(rm));
        }
    }

    /// Records that a task has sent something, so that it is not silent if it is a service.
    pub(super) fn record_sign_of_life(&mut self, tid: Tid) {
        if let Some(service) = self.supervision.services.get_mut(&tid) {
            service.answers = Answers::default();
        }
    }

    /// True if the task is a load watcher that the resource manager or this daemon has started.
    fn is_watcher(&self, tid: Tid) -> bool {
        let task = self.tasks.get(tid);
        task.is_some_and(|task| task.is_service && is_load_watcher(&task.name))
    }

    /// True if the task has announced that it answers.
    pub(super) fn is_supervised(&self, tid: Tid) -> bool {
        self.supervision.services.contains_key(&tid)
    }

    /// Ends the supervision of a task that has ended.
    pub(super) fn forget_service(&mut self, tid: Tid) {
        self.supervision.services.remove(&tid);
    }

    fn check_service(&mut self, tid: Tid) {
        let is_rm = self.rm_state.is_own(tid);
        // A resource manager that another one has replaced is not needed.
        let (is_needed, has_guests) = (is_rm || self.is_watcher(tid), self.has_guests());
        let Some(service) = self.supervision.services.get_mut(&tid) else {
            return;
        };
        let awaits_reply = is_rm && self.tasks.get(tid).is_some_and(Task::awaits_timed_reply);
        if !is_needed || awaits_reply {
            service.answers = Answers::default();
            return;
        }
        if !is_rm && !has_guests && !service.answers.is_asked {
            service.omitted_checks += 1;
            if service.omitted_checks < IDLE_CHECKS {
                return;
            }
        }
        service.omitted_checks = 0;
        let must_ask = service.answers.count_check();
        if must_ask {
            self.send_daemon_message(tid, CTX_RM, TAG_PING, 0, Bytes::new());
        } else if service.answers.is_silent() {
            match is_rm {
                true => self.handle_silent_rm(tid),
                false => self.handle_silent_watcher(tid),
            }
        }
    }

    fn handle_silent_watcher(&mut self, tid: Tid) {
        self.log_warning_and_record(format!(
            "load watcher {tid} of {} has not answered for {} s: the owner was not protected; it is killed and started \
             again",
            self.config.host_name, SILENT_CHECKS_MAX
        ));
        self.supervision.services.remove(&tid);
        self.restart_watcher_soon();
        self.send_to_tasker(ToTasker::Kill { tid });
    }

    fn handle_silent_rm(&mut self, tid: Tid) {
        let Some(rm) = self.rm_state.own().filter(|rm| rm.tid == tid) else {
            return;
        };
        let is_spawned = self.tasks.get(tid).is_some_and(|task| task.is_spawned());
        let consequence = if is_spawned {
            "it is killed"
        } else {
            "it is registered again when it answers, and otherwise another one must be started"
        };
        self.log_warning_and_record(format!(
            "resource manager {tid} has not answered for {SILENT_CHECKS_MAX} s: {consequence}"
        ));
        self.record_event(EventKind::RmGone { tid });
        self.replace_own_rm(None);
        if is_spawned {
            self.supervision.services.remove(&tid);
            return self.send_to_tasker(ToTasker::Kill { tid });
        }
        if let Some(service) = self.supervision.services.get_mut(&tid) {
            service.lost_registration = Some(rm);
        }
    }

    // ---- Tasker

    fn check_tasker(&mut self) {
        if self.tasker_has_ended || !self.has_processes() {
            return self.forget_tasker_question();
        }
        if self.supervision.tasker.count_check() {
            return self.send_to_tasker(ToTasker::Ping);
        }
        let silent_checks = self.supervision.tasker.silent_checks;
        if silent_checks == SILENT_CHECKS_MAX {
            self.log_warning_and_record(format!(
                "the tasker of {} has not answered for {SILENT_CHECKS_MAX} s: no task can be started, stopped or \
                 migrated there; it is killed with its tasks if a guest must stop for the owner, or after \
                 {SILENT_TASKER_CHECKS_MAX} s",
                self.config.host_name
            ));
        }
        self.kill_silent_tasker();
    }

    /// Forgets the question to the tasker: the tasker has answered, has ended, or is not needed.
    pub(super) fn forget_tasker_question(&mut self) {
        self.supervision.tasker = Answers::default();
    }

    /// Kills a silent tasker if guests must stop for the owner, or if it has been silent for too
    /// long. First reports the guests that are not stopped.
    fn kill_silent_tasker(&mut self) {
        let answers = self.supervision.tasker;
        let must_stop_guests = self.has_overdue_guests();
        if answers.silent_checks >= SILENT_TASKER_CHECKS_MAX
            || (answers.is_silent() && must_stop_guests)
        {
            self.report_unstopped_guests();
            self.kill_tasker(format!(
                "it has not answered for {} s",
                answers.silent_checks
            ));
        }
    }

    /// Called when the tasker must have confirmed that the guests are stopped. Reports those that
    /// are not, and kills the tasker if it is silent.
    pub(super) fn handle_guest_stop_timeout(&mut self) {
        if !self.has_overdue_guests() {
            return;
        }
        if self.is_lease_frozen() {
            // The tasker has stopped the guests by itself. It confirms after the renewal.
            self.await_guest_stops();
        } else {
            self.report_unstopped_guests();
            if self.supervision.tasker.is_silent() {
                self.kill_silent_tasker();
            }
        }
    }

    /// Sets the timer for [`Machine::handle_guest_stop_timeout`].
    pub(super) fn await_guest_stops(&mut self) {
        self.set_timer(GUEST_STOP_TIMEOUT, Timer::GuestStopTimeout);
    }
}
