//! Applies entries of the event log to the history. One function handles each subject: hosts,
//! owners, tasks, suspensions, migrations, failures.

use super::{History, LogPosition, Table};
use sempa_proto::event::{Event, EventKind};
use sempa_proto::migration::MigrationCause;
use sempa_proto::rm::{DecisionKind, TaskOutcome, TaskUsage};

impl History {
    /// Applies the next entry of the event log. An entry that was applied before is ignored.
    pub fn apply_event(&mut self, event: &Event) {
        if event.number <= self.log_position.number {
            return;
        }
        self.log_position = LogPosition::after(event);
        self.dirty.insert((Table::LogPosition, 0));
        self.apply_vacate_event(&event.kind);
        self.apply_host_event(event);
        self.apply_owner_event(event);
        self.apply_task_event(event);
        self.apply_suspension_event(event);
        self.apply_migration_event(event);
        self.apply_failure_event(event);
    }

    /// Applies an event about a host: it joined or left, or is being drained.
    fn apply_host_event(&mut self, event: &Event) {
        let at = event.at;
        match &event.kind {
            EventKind::HostAdded { host, name } => {
                self.set_host_name(*host, name);
                self.record_decision(at, DecisionKind::HostJoined { host: name.clone() });
            }
            EventKind::HostGone { host, name, why } => {
                self.set_host_name(*host, name);
                self.record_decision(
                    at,
                    DecisionKind::HostGone {
                        host: name.clone(),
                        why: why.clone(),
                    },
                );
                self.host_gone(at, name);
                self.set_drain(*host, None);
            }
            EventKind::DrainStarted {
                host,
                requested_by: by,
                deadline: until,
            } => {
                self.set_drain(*host, Some((*by, *until)));
                self.record_decision(
                    at,
                    DecisionKind::Drain {
                        host: self.host_name(*host),
                        started: true,
                        requested_by: *by,
                    },
                );
            }
            EventKind::DrainEnded {
                host,
                requested_by: by,
            } => {
                self.set_drain(*host, None);
                self.record_decision(
                    at,
                    DecisionKind::Drain {
                        host: self.host_name(*host),
                        started: false,
                        requested_by: *by,
                    },
                );
            }
            _ => {}
        }
    }

    /// Applies an event about the owner of a host: presence, permission for guests, ended guests.
    fn apply_owner_event(&mut self, event: &Event) {
        let at = event.at;
        match &event.kind {
            EventKind::OwnerPresent { host, why, .. } => {
                let host = self.host_name(*host);
                self.record_decision(
                    at,
                    DecisionKind::OwnerReturned {
                        host,
                        why: why.clone(),
                    },
                );
            }
            EventKind::OwnerAbsent { host, why } => {
                let host = self.host_name(*host);
                self.record_decision(
                    at,
                    DecisionKind::OwnerLeft {
                        host,
                        why: why.clone(),
                    },
                );
            }
            EventKind::HostClosed { host, why } => {
                let host = self.host_name(*host);
                self.record_decision(
                    at,
                    DecisionKind::HostClosed {
                        host,
                        why: why.clone(),
                    },
                );
            }
            EventKind::HostOpened { host } => self.record_decision(
                at,
                DecisionKind::HostOpened {
                    host: self.host_name(*host),
                },
            ),
            EventKind::GuestsEnded { host, guests, why } if !guests.is_empty() => {
                guests.iter().for_each(|tid| self.record_eviction(*tid));
                let (host, tasks) = (self.host_name(*host), guests.clone());
                self.record_decision(
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
    fn apply_task_event(&mut self, event: &Event) {
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
                self.merge_restarted(at, *job, tasks);
                let tasks = tasks
                    .iter()
                    .map(|(tid, host)| (*tid, self.host_name(*host)))
                    .collect();
                self.record_decision(
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
                self.remove_childless(*tid);
                if let Some(number) = self.task_numbers.get(tid).copied() {
                    self.end_task(number, at, TaskOutcome::Status(*status), *used);
                }
            }
            _ => {}
        }
    }

    /// Applies an event about a suspension or a resume.
    fn apply_suspension_event(&mut self, event: &Event) {
        let at = event.at;
        match &event.kind {
            EventKind::Suspended { tid, cause } => {
                self.set_suspended(*tid, at, Some(cause.clone()));
                let host = self.host_of(*tid);
                self.record_decision(
                    at,
                    DecisionKind::Suspended {
                        tid: *tid,
                        host,
                        cause: cause.clone(),
                    },
                );
            }
            EventKind::Resumed { tid, cause } => {
                self.set_suspended(*tid, at, None);
                let host = self.host_of(*tid);
                self.record_decision(
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
            } => self.set_job_suspended(at, *job, *by, true),
            EventKind::JobResumed {
                job,
                requested_by: by,
            } => self.set_job_suspended(at, *job, *by, false),
            _ => {}
        }
    }

    /// Applies an event about a migration or a failed one.
    fn apply_migration_event(&mut self, event: &Event) {
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
                self.record_migration(
                    *tid,
                    self.host_name(*to),
                    matches!(cause, MigrationCause::Owner { .. }),
                );
                let (from, to, cause) = (self.host_name(*from), self.host_name(*to), cause.clone());
                self.record_decision(
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
                    self.host_name(*from),
                    self.host_name(*to),
                    cause.clone(),
                    why.to_string(),
                );
                self.record_decision(
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
    fn apply_failure_event(&mut self, event: &Event) {
        let at = event.at;
        match &event.kind {
            EventKind::CheckpointFailed { job, why } => {
                self.record_decision(
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
                let (job, set) = (self.job_of_checkpoint(set), set.clone());
                self.record_decision(
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
                let host = self.host_name(*host);
                // Programs from a command line are not children of the tasker, so they are not
                // affected.
                let had = |task: &&TaskUsage| task.host == host && !task.program.is_empty();
                let tasks = self.running().filter(had).map(|task| task.tid).collect();
                self.record_decision(
                    at,
                    DecisionKind::TaskerGone {
                        host,
                        tasks,
                        why: why.clone(),
                    },
                );
            }
            EventKind::HostRefused { name, why } => {
                self.record_decision(
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
