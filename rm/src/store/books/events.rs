//! Applies entries of the event log to the history. One function handles each subject: hosts,
//! tasks, suspensions, migrations, failures.

use super::{Books, Place, Sheet};
use sempa_proto::event::{Event, EventKind};
use sempa_proto::migration::MigrationCause;
use sempa_proto::rm::{DecisionKind, TaskOutcome, TaskUsage};

impl Books {
    /// Applies the next entry of the event log. An entry that was applied before is ignored.
    pub fn event(&mut self, event: &Event) {
        if event.number <= self.place.number {
            return;
        }
        self.place = Place::behind(event);
        self.dirty.insert((Sheet::Place, 0));
        self.parked_event(&event.kind);
        self.host_event(event);
        self.task_event(event);
        self.suspension_event(event);
        self.move_event(event);
        self.failure_event(event);
    }

    /// Applies an event about a host: it joined or left, is drained, or its owner's state changed.
    fn host_event(&mut self, event: &Event) {
        let at = event.at;
        match &event.kind {
            EventKind::HostAdded { host, name } => {
                self.know_host(*host, name);
                self.decided(at, DecisionKind::HostJoined { host: name.clone() });
            }
            EventKind::HostGone { host, name, why } => {
                self.know_host(*host, name);
                self.decided(
                    at,
                    DecisionKind::HostGone {
                        host: name.clone(),
                        why: why.clone(),
                    },
                );
                self.host_gone(at, name);
                self.drain(*host, None);
            }
            EventKind::DrainStarted {
                host,
                requested_by: by,
                deadline: until,
            } => {
                self.drain(*host, Some((*by, *until)));
                self.decided(
                    at,
                    DecisionKind::Drain {
                        host: self.host(*host),
                        started: true,
                        requested_by: *by,
                    },
                );
            }
            EventKind::DrainEnded {
                host,
                requested_by: by,
            } => {
                self.drain(*host, None);
                self.decided(
                    at,
                    DecisionKind::Drain {
                        host: self.host(*host),
                        started: false,
                        requested_by: *by,
                    },
                );
            }
            EventKind::OwnerPresent { host, why, .. } => {
                let host = self.host(*host);
                self.decided(
                    at,
                    DecisionKind::OwnerReturned {
                        host,
                        why: why.clone(),
                    },
                );
            }
            EventKind::OwnerAbsent { host, why } => {
                let host = self.host(*host);
                self.decided(
                    at,
                    DecisionKind::OwnerLeft {
                        host,
                        why: why.clone(),
                    },
                );
            }
            EventKind::HostClosed { host, why } => {
                let host = self.host(*host);
                self.decided(
                    at,
                    DecisionKind::HostClosed {
                        host,
                        why: why.clone(),
                    },
                );
            }
            EventKind::HostOpened { host } => self.decided(
                at,
                DecisionKind::HostOpened {
                    host: self.host(*host),
                },
            ),
            EventKind::GuestsEnded { host, guests, why } if !guests.is_empty() => {
                guests.iter().for_each(|tid| self.evicted(*tid));
                let (host, tasks) = (self.host(*host), guests.clone());
                self.decided(
                    at,
                    DecisionKind::GuestsEnded {
                        host,
                        tasks,
                        why: why.clone(),
                    },
                );
            }
            _ => {}
        }
    }

    /// Applies an event about the start, the restart or the end of a task.
    fn task_event(&mut self, event: &Event) {
        let at = event.at;
        match &event.kind {
            EventKind::TaskStarted {
                tid,
                parent,
                name,
                user,
            } => {
                self.task_started(at, *tid, (*parent, *user), name, event.host);
            }
            EventKind::Restarted {
                checkpoint: set,
                job,
                tasks,
                why,
            } => {
                self.restarted(at, *job, tasks);
                let tasks = tasks
                    .iter()
                    .map(|(tid, host)| (*tid, self.host(*host)))
                    .collect();
                self.decided(
                    at,
                    DecisionKind::Restarted {
                        job: *job,
                        checkpoint: set.clone(),
                        tasks,
                        why: why.clone(),
                    },
                );
            }
            EventKind::TaskEnded { tid, status, used } => {
                self.no_loner(*tid);
                if let Some(number) = self.task_numbers.get(tid).copied() {
                    self.end(number, at, TaskOutcome::Status(*status), *used);
                }
            }
            _ => {}
        }
    }

    /// Applies an event about a suspension or a resume.
    fn suspension_event(&mut self, event: &Event) {
        let at = event.at;
        match &event.kind {
            EventKind::Suspended { tid, cause } => {
                self.suspended(*tid, at, Some(cause.clone()));
                let host = self.host_of(*tid);
                self.decided(
                    at,
                    DecisionKind::Suspended {
                        tid: *tid,
                        host,
                        cause: cause.clone(),
                    },
                );
            }
            EventKind::Resumed { tid, cause } => {
                self.suspended(*tid, at, None);
                let host = self.host_of(*tid);
                self.decided(
                    at,
                    DecisionKind::Resumed {
                        tid: *tid,
                        host,
                        cause: cause.clone(),
                    },
                );
            }
            EventKind::JobSuspended {
                job,
                requested_by: by,
            } => self.job_suspended(at, *job, *by, true),
            EventKind::JobResumed {
                job,
                requested_by: by,
            } => self.job_suspended(at, *job, *by, false),
            _ => {}
        }
    }

    /// Applies an event about a migration or a failed one.
    fn move_event(&mut self, event: &Event) {
        let at = event.at;
        match &event.kind {
            EventKind::Migrated {
                tid,
                from,
                to,
                cause,
                bytes,
                frozen,
                ..
            } => {
                self.moved(
                    *tid,
                    self.host(*to),
                    matches!(cause, MigrationCause::Owner { .. }),
                );
                let (from, to, cause) = (self.host(*from), self.host(*to), cause.clone());
                self.decided(
                    at,
                    DecisionKind::Migrated {
                        tid: *tid,
                        from,
                        to,
                        cause,
                        bytes: *bytes,
                        frozen: *frozen,
                    },
                );
            }
            EventKind::MigrationFailed {
                tid,
                from,
                to,
                cause,
                step,
                why,
                ..
            } => {
                let (from, to, cause, why) = (
                    self.host(*from),
                    self.host(*to),
                    cause.clone(),
                    why.to_string(),
                );
                self.decided(
                    at,
                    DecisionKind::MigrationFailed {
                        tid: *tid,
                        from,
                        to,
                        cause,
                        step: *step,
                        why,
                    },
                );
            }
            _ => {}
        }
    }

    /// Applies an event about a failure of a checkpoint, a restart, a tasker or a host.
    fn failure_event(&mut self, event: &Event) {
        let at = event.at;
        match &event.kind {
            EventKind::CheckpointFailed { job, why } => {
                self.decided(
                    at,
                    DecisionKind::CheckpointFailed {
                        job: *job,
                        why: why.clone(),
                    },
                );
            }
            EventKind::RestartFailed {
                checkpoint: set,
                cause,
                why,
            } => {
                let (job, set) = (self.job_of_set(set), set.clone());
                self.decided(
                    at,
                    DecisionKind::RestartFailed {
                        job,
                        checkpoint: set,
                        cause: cause.clone(),
                        why: why.clone(),
                    },
                );
            }
            EventKind::TaskerGone { host, why } => {
                let host = self.host(*host);
                // Programs from a command line are not children of the tasker, so they are not
                // affected.
                let had = |task: &&TaskUsage| task.host == host && !task.program.is_empty();
                let tasks = self.running().filter(had).map(|task| task.tid).collect();
                self.decided(
                    at,
                    DecisionKind::TaskerGone {
                        host,
                        tasks,
                        why: why.clone(),
                    },
                );
            }
            EventKind::HostRefused { name, why } => {
                self.decided(
                    at,
                    DecisionKind::HostRefused {
                        host: name.clone(),
                        why: why.clone(),
                    },
                );
            }
            _ => {}
        }
    }
}
